"""How bodies become prompts: messages and texts as token ids, cut where asked, refused where they leave no room.

Used by `chat.py`, `completions.py`, `tokens.py` and `render.py`. What messages may hold is checked by the frontend.
"""

from typing import Annotated, Any, Literal, NamedTuple, Protocol

import msgspec

from quire.api.server.fields import (
    MAX_MESSAGE_VALUES,
    MAX_MESSAGES,
    MAX_TEMPLATE_VALUES,
    Refusals,
    Side,
    Text,
    check_vocabulary,
    given,
)
from quire.errors import RequestError
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.model import ModelInfo
from quire.frontend.tokenizer import Tokenizer, too_long
from quire.params import MAX_TEXT_CHARS, free

CUT_CONTEXTS = 8  # messages that are to be cut may make a prompt of this many contexts, but not more

_MESSAGE_SCHEMA = {
    "required": ["role", "content"],
    "properties": {
        "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
        "content": {
            "anyOf": [
                {"type": "string", "maxLength": MAX_TEXT_CHARS},
                {"type": "array", "items": {"$ref": "#/components/schemas/TextPart"}, "maxItems": MAX_MESSAGE_VALUES},
            ]
        },
    },
}
# Not structs: templates may know more keys than we do.
Message = Annotated[dict[str, Any], msgspec.Meta(extra_json_schema=_MESSAGE_SCHEMA)]
Messages = Annotated[
    list[Message], free(MAX_MESSAGE_VALUES), msgspec.Meta(max_length=MAX_MESSAGES, extra_json_schema={"minItems": 1})
]
_TEXT_SCHEMA = {"type": "string", "maxLength": MAX_TEXT_CHARS}
Document = Annotated[
    dict[str, Any], msgspec.Meta(extra_json_schema={"properties": {"title": _TEXT_SCHEMA, "text": _TEXT_SCHEMA}})
]
Documents = Annotated[list[Document], free(MAX_MESSAGE_VALUES), msgspec.Meta(max_length=MAX_MESSAGES)]
TemplateArguments = Annotated[dict[str, Any], free(MAX_TEMPLATE_VALUES, maxProperties=MAX_TEMPLATE_VALUES)]

TEMPLATE_REFUSED: Refusals = {
    "chat_template": given,  # a template is a program: the operator chooses it, with --chat-template
    "mm_processor_kwargs": given,
    "media_io_kwargs": given,
}


class TextPart(msgspec.Struct):
    """The one kind of part there is so far."""

    type: Literal["text"]
    text: Text


class TemplateOptions(Protocol):
    """Fields of a body that say how its messages become a prompt."""

    add_generation_prompt: bool | None
    continue_final_message: bool | None
    add_special_tokens: bool | None
    chat_template_kwargs: dict[str, Any] | None
    documents: list[dict[str, Any]] | None
    reasoning_effort: str | None


class CutOptions(Protocol):
    """Fields of a body that say how a prompt that is too long is cut."""

    truncate_prompt_tokens: int | None
    truncation_side: Side | None


class PromptText(NamedTuple):
    token_ids: list[int]
    text: str | None  # None: it was given as token ids, or has been cut


async def encode_messages(
    llm: AsyncLLM,
    messages: list[dict[str, Any]],
    options: TemplateOptions,
    tools: list[dict[str, Any]] = [],
    may_be_cut: bool = False,
) -> list[int]:
    """The token ids of the prompt that messages make. `may_be_cut`: it need not fit the context."""
    continues = bool(options.continue_final_message)
    opens_answer = options.add_generation_prompt if options.add_generation_prompt is not None else not continues
    arguments = dict(llm.model.config.model.default_chat_template_kwargs)
    if options.reasoning_effort is not None:
        arguments |= {
            "reasoning_effort": options.reasoning_effort,
            "enable_thinking": options.reasoning_effort != "none",
        }
    arguments |= options.chat_template_kwargs or {}
    if options.documents is not None:
        arguments["documents"] = options.documents
    max_tokens = CUT_CONTEXTS * llm.model.max_model_len if may_be_cut else None
    try:
        token_ids = await llm.encode_chat(messages, opens_answer, continues, arguments, tools, max_tokens)
    except RequestError as error:
        error.param = "messages"
        raise
    if options.add_special_tokens:
        before, after = added_ids(llm.model.need_tokenizer("a chat"))
        token_ids = [*before, *token_ids, *after]
    return token_ids


def added_ids(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """The special tokens that the tokenizer puts before a text, and after it."""
    plain, full = tokenizer.encode("a", add_special_tokens=False), tokenizer.encode("a")
    starts = range(len(full) - len(plain) + 1)
    start = next((start for start in starts if full[start : start + len(plain)] == plain), 0)
    return full[:start], full[start + len(plain) :]


async def encode_prompt(
    llm: AsyncLLM, prompt: str | list[int], add_special_tokens: bool, options: CutOptions, num_answer_tokens: int
) -> PromptText:
    """A raw prompt, cut as asked."""
    if not isinstance(prompt, str):
        check_vocabulary("prompt", prompt, llm.model.vocab_size)
        return PromptText(cut(prompt, options, llm.model, num_answer_tokens), None)
    text = prompt
    if options.truncate_prompt_tokens is not None:  # so that no more is tokenized than could be kept
        most = llm.model.max_model_len * llm.model.need_tokenizer("a text").longest_token_chars
        text = text[-most:] if options.truncation_side == "left" else text[:most]
        tokenizer = llm.model.need_tokenizer("a text")
        token_ids = await llm.off_loop(lambda: tokenizer.encode(text, add_special_tokens), len(text))
        kept = cut(token_ids, options, llm.model, num_answer_tokens)
        return PromptText(kept, prompt if len(kept) == len(token_ids) and text == prompt else None)
    try:
        return PromptText(await llm.encode(prompt, add_special_tokens), prompt)
    except RequestError as error:
        error.param = "prompt"
        raise


def cut(token_ids: list[int], options: CutOptions, model: ModelInfo, num_answer_tokens: int) -> list[int]:
    """As many tokens as are to be kept; -1 keeps what leaves room for the answer."""
    num_kept = options.truncate_prompt_tokens
    if num_kept is None:
        return token_ids
    if num_kept == -1:
        num_kept = max(1, model.max_model_len - num_answer_tokens)
    if options.truncation_side == "left":
        return token_ids[max(0, len(token_ids) - num_kept) :]
    return token_ids[:num_kept]


def check_room(model: ModelInfo, token_ids: list[int], num_answer_tokens: int, param: str) -> None:
    """TooLongError where prompt and answer do not fit the context together."""
    if len(token_ids) + num_answer_tokens > model.max_model_len:
        raise too_long(len(token_ids), model.max_model_len, num_answer_tokens, param=param)
