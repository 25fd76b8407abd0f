"""/tokenize, /detokenize, /tokenizer_info: what the model's tokenizer makes of text, messages and token ids.

Called by `app.py`; nothing here reaches the engine.
"""

import functools
from typing import ClassVar

import msgspec

from quire.api.server.calls import Answer, Call
from quire.api.server.fields import Name, Refusals, RequestBody, Text, TokenIds, check_vocabulary, decode
from quire.api.server.generation import INLINE_TOKENS
from quire.api.server.prompts import TEMPLATE_REFUSED, Documents, Messages, TemplateArguments, encode_messages
from quire.api.server.shape import Tools
from quire.errors import RequestError
from quire.frontend.model import ModelInfo


class TokenizeRequest(RequestBody, kw_only=True):
    """Either a prompt, or messages and how they become one."""

    refused: ClassVar[Refusals] = TEMPLATE_REFUSED

    model: Name | None = None
    prompt: Text | None = None
    add_special_tokens: bool | None = None  # null: of a prompt, not of messages
    messages: Messages | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateArguments | None = None
    documents: Documents | None = None
    reasoning_effort: Name | None = None
    tools: Tools | None = None
    return_token_strs: bool | None = None


class TokenizeAnswer(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(RequestBody, kw_only=True):
    tokens: TokenIds
    model: Name | None = None


class DetokenizeAnswer(msgspec.Struct):
    prompt: str


class AddedToken(msgspec.Struct):
    content: str
    special: bool


class TokenizerInfo(msgspec.Struct, kw_only=True):
    """What a tokenizer_config.json says, as far as it matters here."""

    tokenizer_class: str
    vocab_size: int
    model_max_length: int
    bos_token: str | None
    eos_token: str | None
    unk_token: str | None
    pad_token: str | None
    added_tokens_decoder: dict[int, AddedToken]
    chat_template: str | None


async def tokenize(call: Call) -> Answer:
    body = await decode(call.body, TokenizeRequest)
    llm = call.service.llm
    call.service.model_name(body.model)
    if body.messages is not None and body.prompt is None:
        tokens = await encode_messages(llm, body.messages, body, msgspec.to_builtins(body.tools or []))
    elif body.prompt is not None and body.messages is None:
        tokens = await llm.encode(body.prompt, add_special_tokens=body.add_special_tokens is not False)
    else:
        raise RequestError("give either prompt or messages", "prompt")
    answer = functools.partial(_tokenized, llm.model, tokens, bool(body.return_token_strs))
    return await llm.off_loop(answer, len(tokens)) if len(tokens) > INLINE_TOKENS else answer()


def _tokenized(model: ModelInfo, tokens: list[int], with_strings: bool) -> Answer:
    strings = None
    if with_strings:
        spelling = model.need_tokenizer("return_token_strs").backend.id_to_token
        strings = [spelling(token_id) or "" for token_id in tokens]
    return Answer.large_json(TokenizeAnswer(len(tokens), model.max_model_len, tokens, strings))


async def detokenize(call: Call) -> Answer:
    body = await decode(call.body, DetokenizeRequest)
    llm = call.service.llm
    call.service.model_name(body.model)
    if len(body.tokens) > (limit := llm.model.max_model_len):
        raise RequestError(f"there are {len(body.tokens):,} tokens and the context is {limit:,}: send fewer", "tokens")
    check_vocabulary("tokens", body.tokens, llm.model.vocab_size)
    return Answer.json(DetokenizeAnswer(await llm.decode(body.tokens)))


async def tokenizer_info(call: Call) -> Answer:
    model = call.service.llm.model
    return await call.service.llm.off_loop(lambda: Answer.large_json(_tokenizer_info(model)))


def _tokenizer_info(model: ModelInfo) -> TokenizerInfo:
    tokenizer = model.need_tokenizer("/tokenizer_info")
    added = tokenizer.backend.get_added_tokens_decoder()
    named = {name: tokenizer.special_tokens.get(name) for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
    return TokenizerInfo(
        tokenizer_class="PreTrainedTokenizerFast",  # as transformers calls one that is made of a tokenizer.json
        vocab_size=tokenizer.vocab_size,
        model_max_length=model.max_model_len,
        added_tokens_decoder={idx: AddedToken(token.content, token.special) for idx, token in sorted(added.items())},
        chat_template=model.template.source,
        **named,
    )
