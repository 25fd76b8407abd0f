"""/tokenize and /detokenize: what the model's tokenizer makes of text, messages and token ids.

Called by `app.py`; nothing here reaches the engine.
"""

import functools

import msgspec

from quire.api.server.calls import Answer, Call
from quire.api.server.chat import TEMPLATE_REFUSED, Messages, TemplateArguments, encode
from quire.api.server.fields import Name, Text, TokenIds, check_vocabulary, decode
from quire.api.server.generation import INLINE_TOKENS
from quire.api.server.shape import Tools
from quire.errors import RequestError
from quire.frontend.model import ModelInfo


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Either a prompt, or messages and how they become one."""

    model: Name | None = None
    prompt: Text | None = None
    add_special_tokens: bool | None = None
    messages: Messages | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateArguments | None = None
    reasoning_effort: Name | None = None
    tools: Tools | None = None
    return_token_strs: bool | None = None


class TokenizeAnswer(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    tokens: TokenIds
    model: Name | None = None


class DetokenizeAnswer(msgspec.Struct):
    prompt: str


async def tokenize(call: Call) -> Answer:
    body = await decode(call.body, TokenizeRequest, TEMPLATE_REFUSED)
    llm = call.service.llm
    call.service.model_name(body.model)
    if body.messages is not None and body.prompt is None:
        tokens = await encode(llm, body.messages, body, msgspec.to_builtins(body.tools or []))
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
    body = await decode(call.body, DetokenizeRequest, {})
    llm = call.service.llm
    call.service.model_name(body.model)
    if len(body.tokens) > (limit := llm.model.max_model_len):
        raise RequestError(f"there are {len(body.tokens):,} tokens and the context is {limit:,}: send fewer", "tokens")
    check_vocabulary("tokens", body.tokens, llm.model.vocab_size)
    return Answer.json(DetokenizeAnswer(await llm.decode(body.tokens)))
