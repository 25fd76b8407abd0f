"""use_beam_search: the `n` likeliest answers to a prompt, found token by token by requests of their own.

Called by `generation.py`; gives streams that are finished, which chat and completions write as they write others.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

from quire.api.beam_search import BeamSearch
from quire.api.server.calls import AbortOnDisconnect, Call
from quire.api.server.fields import SamplingFields
from quire.errors import DeadlineError, RequestError
from quire.frontend.async_llm import Stream
from quire.frontend.requests import RequestState
from quire.messages import ChoiceDelta
from quire.params import ALL, BeamSearchParams, SamplingParams


async def search(
    call: Call,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    fields: SamplingFields,
    options: dict[str, Any],
) -> list[Stream]:
    """`options`: of `AsyncLLM.submit`, for the request of every token."""
    llm = call.service.llm
    _check(params, fields, llm.serving.max_logprobs)
    requests = [llm.inputs.request(call.core_id(), list(prompt), params) for prompt in prompts]
    call.streams += [Stream(request, lambda _: None) for request in requests]
    beams = BeamSearchParams(
        beam_width=params.n,
        max_tokens=params.max_tokens or llm.model.max_model_len,
        ignore_eos=params.ignore_eos,
        length_penalty=1.0 if fields.length_penalty is None else fields.length_penalty,
    )
    found = BeamSearch(llm.model, prompts, beams)
    limits = [limit for limit in (fields.timeout_s, llm.serving.request_timeout_s) if limit is not None]
    try:
        async with asyncio.timeout(min(limits, default=None)):
            await _run(call, found, options)
    except TimeoutError:
        raise DeadlineError("the request's time limit passed before it was finished: raise timeout_s") from None
    finally:
        for request, sequences in zip(requests, found.best()):
            _fill(request, [(beam.tokens, beam.finish_reason) for beam in sequences])
    return call.streams


def _check(params: SamplingParams, fields: SamplingFields, max_logprobs: int) -> None:
    if fields.stream:
        raise RequestError("use_beam_search cannot be streamed: set stream to false", "stream")
    if params.structured_outputs is not None:
        raise RequestError("beams cannot have a format or call tools: leave use_beam_search out", "use_beam_search")
    if params.logprobs is not None or params.logprob_token_ids or params.prompt_logprobs is not None:
        raise RequestError("beams come without logprobs: leave logprobs or use_beam_search out", "logprobs")
    if max_logprobs != ALL and 2 * params.n > max_logprobs:
        message = f"with use_beam_search n must be at most {max_logprobs // 2}, not {params.n}"
        raise RequestError(message, "n", hint="--max-logprobs")


async def _run(call: Call, found: BeamSearch, options: dict[str, Any]) -> None:
    """Until nothing grows, or the client has left."""
    llm = call.service.llm
    running: list[Stream] = []
    client = AbortOnDisconnect(call.receive, running)
    async with client:
        while asked := found.asked():
            running.clear()
            for tokens in asked:
                running.append(await llm.submit(tokens, found.step, request_id=call.core_id(), **options))
            outputs = [(await stream.wait()).output() for stream in running]
            if client.watcher.done() or any(output.outputs[0].finish_reason == "abort" for output in outputs):
                return
            found.take(outputs)


def _fill(request: RequestState, sequences: Sequence[tuple[list[int], str | None]]) -> None:
    num_prompt_tokens = len(request.prompt_token_ids)
    for idx, (tokens, finish_reason) in enumerate(sequences):
        request.add_delta(ChoiceDelta(request.request_id, idx, tokens[num_prompt_tokens:], finish_reason))
    del request.choices[len(sequences) :]  # a small vocabulary has fewer
    request.end("length")
