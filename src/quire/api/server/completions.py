"""/v1/completions: raw prompts in OpenAI's older protocol, as text or token ids, one or many, echoed when asked.

Called by `app.py`. Choices are numbered prompt by prompt: choice `c` of prompt `p` is p × n + c.
"""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, UnsetType

from quire.api.server.calls import Answer, Call
from quire.api.server.fields import (
    MAX_TOKEN_IDS,
    NumLogprobs,
    Refusals,
    SamplingFields,
    Text,
    TokenId,
    TokenIds,
    at_most,
    decode,
    whole,
)
from quire.api.server.generation import Usage, built, finish, submit, text_of, usage
from quire.api.server.logprobs import CompletionLogprobs, CompletionLogprobsWriter, PromptLogprobs, prompt_logprobs
from quire.api.server.prompts import PromptText, check_room, encode_prompt
from quire.api.server.shape import answer_constraint
from quire.api.server.sse import ChoiceEvents, EventFormat, EventStream, Opening
from quire.errors import RequestError
from quire.frontend.async_llm import AsyncLLM, Stream
from quire.frontend.requests import ChoiceState, ChoiceUpdate
from quire.frontend.tokenizer import Tokenizer
from quire.params import ALL, MAX_N, SamplingParams
from quire.utils.loop_share import LoopShare

DEFAULT_MAX_TOKENS = 16
MAX_REPEATED_TOKENS = 1 << 20  # of prompts, in one answer


Prompts = Text | Annotated[list[Text | TokenId | TokenIds], at_most(MAX_TOKEN_IDS)]


class CompletionRequest(SamplingFields, kw_only=True):
    operation: ClassVar[str] = "text_completion"
    refused: ClassVar[Refusals] = {**SamplingFields.refused, "suffix": bool}

    prompt: Prompts
    logprobs: NumLogprobs | None = None  # at most --max-logprobs of the server
    echo: bool | None = None
    best_of: Annotated[int, whole(1, MAX_N)] | None = None  # the same as n, or refused
    add_special_tokens: bool | None = None

    def prompts(self) -> list[str | list[int]]:
        prompt: Any = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        kinds = set(map(type, prompt))
        if kinds == {int}:
            return [prompt]
        if not kinds or int in kinds:
            message = "prompt must be text, a list of texts, a list of token ids or a list of such lists"
            raise RequestError(message, "prompt")
        return prompt


class CompletionChoice(msgspec.Struct, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Completion(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage


async def completions(call: Call) -> Answer | EventStream:
    body = await decode(call.body, CompletionRequest)
    llm = call.service.llm
    model_name = call.service.model_name(body.model)
    call.own_id = body.request_id
    prompts, params = await prepare(call, body)
    echoes = [await _as_text(llm, prompt) if body.echo else None for prompt in prompts]
    streams = await submit(call, [prompt.token_ids for prompt in prompts], params, body)
    _check_echo(body, params, streams)
    written = [_Prompt(body, llm.model.tokenizer, stream, echo) for stream, echo in zip(streams, echoes)]
    head = call.head("cmpl", model_name)
    if body.stream:
        return EventStream(ChoiceEvents(_format(head, body, written), streams, params.n), call)
    await finish(call, streams)

    def completion() -> Completion:
        choices = [choice for prompt in written for choice in prompt.choices()]
        for idx, choice in enumerate(choices):
            choice.index = idx
        num_completion_tokens = 0 if body.asked_tokens == 0 else None
        return Completion(**head, choices=choices, usage=usage(streams, num_completion_tokens))

    return await built(call, completion)


async def prepare(
    call: Call, body: CompletionRequest, cuts_answer: bool = False
) -> tuple[list[PromptText], SamplingParams]:
    """What a body asks of the engine; RequestError says what is wrong with it. `cuts_answer`: where the context has no
    room for all the tokens that were asked for, the answer is shorter; else the body is refused."""
    llm = call.service.llm
    prompts = body.prompts()
    body.check(len(prompts), llm.serving)
    params = _params(body, llm)
    num_answer_tokens = 1 if cuts_answer else body.asked_tokens or 1  # the default gives way where there is less room
    encoded = []
    share = LoopShare()
    for prompt in prompts:
        with_special = body.add_special_tokens is not False
        encoded.append(await encode_prompt(llm, prompt, with_special, body, num_answer_tokens))
        check_room(llm.model, encoded[-1].token_ids, num_answer_tokens, "prompt")
        await share.pause()
    return encoded, params


def _params(body: CompletionRequest, llm: AsyncLLM) -> SamplingParams:
    n = body.n or 1
    if body.best_of is not None and body.best_of != n:
        message = "best_of other than n is not supported by this server: leave it out"
        raise RequestError(message, "best_of", "unsupported_value")
    num_logprobs = body.logprobs
    if body.logprob_token_ids:
        if num_logprobs is None:
            raise RequestError("logprob_token_ids needs logprobs to be set", "logprob_token_ids")
        num_logprobs = None  # as many as it names
    max_tokens = body.asked_tokens
    if max_tokens is None and body.n_predict is None:
        max_tokens = DEFAULT_MAX_TOKENS
    if max_tokens == 0 and body.echo:
        if body.stream:
            raise RequestError("max_tokens of 0 with echo cannot be streamed: set stream to false", "max_tokens")
        max_tokens = 1  # the engine always computes one token; it is left out of the answer
    num_prompt_logprobs = body.prompt_logprobs
    if body.echo and body.logprobs is not None:
        asked = (body.logprobs, num_prompt_logprobs or 0)
        num_prompt_logprobs = ALL if ALL in asked else max(asked)
    return body.params(
        llm.model,
        max_tokens=llm.model.max_answer_tokens(max_tokens),
        logprobs=num_logprobs,
        prompt_logprobs=num_prompt_logprobs,
        structured_outputs=answer_constraint(body),
    )


def _check_echo(body: CompletionRequest, params: SamplingParams, streams: Sequence[Stream]) -> None:
    """Bounds the prompts that an answer repeats, one per choice; their size is known only after they are tokenized."""
    if not (body.echo or body.return_token_ids):
        return
    num_tokens = params.n * sum(len(stream.request.prompt_token_ids) for stream in streams)
    if num_tokens > MAX_REPEATED_TOKENS:
        raise RequestError(
            f"prompts repeated in every choice make {num_tokens:,} tokens, the limit is {MAX_REPEATED_TOKENS:,}: "
            "lower n, or do without echo and return_token_ids",
            "echo" if body.echo else "return_token_ids",
        )


async def _as_text(llm: AsyncLLM, prompt: PromptText) -> str:
    return prompt.text if prompt.text is not None else await llm.decode(prompt.token_ids)


class _Prompt:
    """One prompt of a call: how its choices are written."""

    def __init__(
        self,
        body: CompletionRequest,
        tokenizer: Tokenizer | None,
        stream: Stream,
        echo: str | None,
    ) -> None:
        self.body = body
        self.tokenizer = tokenizer
        self.request = stream.request
        self.echo = echo  # the prompt as text, where it begins the answer
        self.writers: list[CompletionLogprobsWriter] = []  # one per choice, where logprobs are asked for
        if body.logprobs is not None:
            params, token_ids = self.request.params, self.request.prompt_token_ids
            as_ids = bool(body.return_tokens_as_token_ids)
            self.writers = [CompletionLogprobsWriter(params, tokenizer, token_ids, as_ids) for _ in range(params.n)]

    def choices(self) -> list[CompletionChoice]:
        return [self._choice(choice) for choice in self.request.choices]

    def _choice(self, choice: ChoiceState) -> CompletionChoice:
        columns = self.echoed(choice.index)
        only_echo = self.body.asked_tokens == 0
        num_tokens = 0 if only_echo else len(choice.token_ids)
        if self.writers:
            columns = self.writers[choice.index].write(choice.logprobs[:num_tokens], columns)
        return CompletionChoice(
            index=choice.index,
            text=(self.echo or "") + ("" if only_echo else text_of(choice)),
            logprobs=columns,
            finish_reason="length" if only_echo else choice.finish_reason,
            stop_reason=None if only_echo else choice.stop_reason,
            token_ids=choice.token_ids[:num_tokens] if self.body.return_token_ids else UNSET,
            **self.extras(),
        )

    def opening(self, idx: int) -> dict[str, Any] | None:
        """The first event of a streamed choice, where there is something to say before its first token."""
        extras = self.extras()
        if self.echo is None and not extras:
            return None
        return {"text": self.echo or "", "logprobs": self.echoed(idx), **extras}

    def echoed(self, idx: int) -> CompletionLogprobs | None:
        if self.echo is None or not self.writers:
            return None
        return self.writers[idx].echo(self.echo, self.request.prompt_logprobs)

    def extras(self) -> dict[str, Any]:
        extras: dict[str, Any] = {}
        if self.body.wants_prompt_logprobs:
            extras["prompt_logprobs"] = prompt_logprobs(self.request.prompt_logprobs, self.tokenizer)
        if self.body.return_token_ids:
            extras["prompt_token_ids"] = self.request.prompt_token_ids
        return extras


def _format(head: dict[str, Any], body: CompletionRequest, prompts: Sequence[_Prompt]) -> EventFormat:
    n = body.n or 1

    def opening(idx: int) -> Opening:
        fields = prompts[idx // n].opening(idx % n)
        return (fields, {}) if fields is not None else None

    def can_open(idx: int) -> bool:
        """Whether the prompt's logprobs are there: the first choice computes them, and others may be ahead of it."""
        request = prompts[idx // n].request
        if request.params.prompt_logprobs is None:
            return True
        return len(request.prompt_logprobs) >= len(request.prompt_token_ids) - 1

    def logprobs(update: ChoiceUpdate) -> CompletionLogprobs:
        return prompts[update.index // n].writers[update.index % n].write(update.logprobs)

    echoes_logprobs = bool(body.echo) and body.logprobs is not None
    return EventFormat(
        head={**head, "object": "text_completion"},
        before_text=b'"text":',
        after_text=b"",
        opening=opening,
        can_open=can_open,
        slow_opening=body.wants_prompt_logprobs or echoes_logprobs,
        logprobs=logprobs if body.logprobs is not None else None,
        token_ids=bool(body.return_token_ids),
        usage_at_end=body.usage_at_end,
        usage_always=body.usage_always,
    )
