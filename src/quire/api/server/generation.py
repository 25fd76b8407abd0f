"""What chat and completions do alike: start requests, wait for whole answers, count usage.

Used by `chat.py` and `completions.py`. Knows AsyncLLM's streams, not how an answer looks.
"""

from collections.abc import Callable, Sequence

import msgspec
from msgspec import UNSET, UnsetType

from quire.api.server import beams
from quire.api.server.calls import AbortOnDisconnect, Answer, Call
from quire.api.server.fields import SamplingFields
from quire.frontend.async_llm import Stream
from quire.frontend.requests import ChoiceState
from quire.params import SamplingParams
from quire.utils.loop_share import LoopShare

INLINE_TOKENS = 2048  # answers up to here, logprobs included, are written on the spot


class CachedTokens(msgspec.Struct):
    cached_tokens: int


class CompletionDetails(msgspec.Struct):
    """What the tokens of answers were; what does not apply is left out."""

    reasoning_tokens: int | UnsetType = UNSET
    accepted_prediction_tokens: int | UnsetType = UNSET
    rejected_prediction_tokens: int | UnsetType = UNSET


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: CompletionDetails | UnsetType = UNSET


def usage(
    streams: Sequence[Stream], num_completion_tokens: int | None = None, num_thinking: int | None = None
) -> Usage:
    """Of all streams together. `num_completion_tokens`: None counts the tokens generated so far. `num_thinking`: how
    many of them were thinking, where the model thinks."""
    if num_completion_tokens is None:
        num_completion_tokens = sum(len(choice.token_ids) for stream in streams for choice in stream.request.choices)
    num_prompt_tokens = sum(len(stream.request.prompt_token_ids) for stream in streams)
    num_cached_tokens = sum(stream.request.metrics.num_cached_tokens for stream in streams)
    return Usage(
        num_prompt_tokens,
        num_completion_tokens,
        num_prompt_tokens + num_completion_tokens,
        CachedTokens(num_cached_tokens),
        _details(streams, num_thinking),
    )


def _details(streams: Sequence[Stream], num_thinking: int | None) -> CompletionDetails | UnsetType:
    requests = [stream.request for stream in streams if stream.request.message.prediction]
    if not requests and num_thinking is None:
        return UNSET
    details = CompletionDetails(num_thinking if num_thinking is not None else UNSET)
    if requests:
        details.accepted_prediction_tokens = sum(request.num_accepted for request in requests)
        details.rejected_prediction_tokens = sum(request.num_rejected for request in requests)
    return details


async def submit(
    call: Call,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    fields: SamplingFields,
    thinks: bool = False,
    prediction: str = "",
) -> list[Stream]:
    """One stream per prompt. They are the call's: none runs on when it is over, or when one of them is refused."""
    core_id = call.core_id()
    options = fields.submit_options() | {"thinks": thinks, "owner": call.record.owner, "prediction": prediction}
    share = LoopShare()
    streams = call.streams
    # Refers to the streams and not to the call, which holds the record: a cycle would keep both alive for a while.
    call.record.usage = lambda: usage(streams)
    if call.record.trace is not None:
        call.record.trace.generates(call, fields, params)
    if call.record.limits is not None:
        max_model_len = call.service.llm.model.max_model_len
        call.record.limits.reserve(sum(_most_tokens(len(prompt), params, max_model_len) for prompt in prompts))
    if fields.use_beam_search:
        return await beams.search(call, prompts, params, fields, fields.submit_options() | {"owner": options["owner"]})
    for idx, prompt in enumerate(prompts):
        streams.append(await call.service.llm.submit(prompt, params, request_id=f"{core_id}-{idx}", **options))
        await share.pause()
    return streams


def _most_tokens(num_prompt_tokens: int, params: SamplingParams, max_model_len: int) -> int:
    """Of a prompt and its answers together."""
    room = max(0, max_model_len - num_prompt_tokens)
    return num_prompt_tokens + params.n * min(params.max_tokens or room, room)


async def finish(call: Call, streams: Sequence[Stream]) -> None:
    """Waits until all answers are complete, or the client disconnects."""
    async with AbortOnDisconnect(call.receive, streams):
        for stream in streams:
            await stream.wait()


async def built(call: Call, make: Callable[[], msgspec.Struct]) -> Answer:
    """A whole answer: encoded at once where it is short, else in a thread, so that other calls do not wait for it."""
    size = 0
    for stream in call.streams:
        request = stream.request
        size += len(request.prompt_logprobs) * request.params.n
        for choice in request.choices:
            size += len(choice.token_ids) + sum(len(entry.top_ids) for entry in choice.logprobs)
    if size <= INLINE_TOKENS:
        return Answer.json(make())
    return await call.service.llm.off_loop(lambda: Answer.large_json(make()), size)


def text_of(choice: ChoiceState) -> str:
    return "".join(choice.texts)
