"""/v1/chat/completions/render and /v1/completions/render: what a body would ask of the engine, without asking it.

Called by `app.py`. The checks and the tokenizing are those of `chat.py` and `completions.py`.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from quire.api.server import chat, completions
from quire.api.server.calls import Answer, Call
from quire.api.server.fields import SamplingFields, StreamOptions, decode
from quire.params import SamplingParams


class Rendered(msgspec.Struct, kw_only=True):
    """A prompt and its parameters, with vLLM's names; `prompt` is what the token ids spell."""

    request_id: str
    token_ids: list[int]
    prompt: str
    sampling_params: dict[str, Any]
    model: str
    stream: bool
    stream_options: StreamOptions | None
    cache_salt: str | None
    priority: int
    features: None = None
    token_offsets: None = None


async def render_chat(call: Call) -> Answer:
    body = await decode(call.body, chat.ChatRequest)
    call.own_id = body.request_id
    model_name = call.service.model_name(body.model)
    prompt = await chat.prepare(call, body)
    (rendered,) = await _rendered(call, f"chatcmpl-{call.request_id}", model_name, body, prompt.params, [prompt])
    return await _answer(call, rendered, len(rendered.token_ids))


async def render_completions(call: Call) -> Answer:
    body = await decode(call.body, completions.CompletionRequest)
    call.own_id = body.request_id
    model_name = call.service.model_name(body.model)
    prompts, params = await completions.prepare(call, body)
    rendered = await _rendered(call, f"cmpl-{call.request_id}", model_name, body, params, prompts)
    return await _answer(call, rendered, sum(len(prompt.token_ids) for prompt in prompts))


async def _rendered(
    call: Call,
    answer_id: str,
    model_name: str,
    body: SamplingFields,
    params: SamplingParams,
    prompts: Sequence[Any],
) -> list[Rendered]:
    """`prompts`: what has token ids."""
    return [
        Rendered(
            request_id=answer_id if len(prompts) == 1 else f"{answer_id}-{idx}",
            token_ids=prompt.token_ids,
            prompt=await call.service.llm.decode(prompt.token_ids),
            sampling_params=msgspec.to_builtins(params),
            model=model_name,
            stream=bool(body.stream),
            stream_options=body.stream_options,
            cache_salt=body.cache_salt,
            priority=body.priority or 0,
        )
        for idx, prompt in enumerate(prompts)
    ]


async def _answer(call: Call, value: Any, num_tokens: int) -> Answer:
    return await call.service.llm.off_loop(lambda: Answer.large_json(value), num_tokens)
