"""The truth about a live request: prompt, parameters, seed, every token so far, and the text they make.

Fed with the core's deltas, read by whoever answers the user. Everything needed to start the request again on a fresh
core is here.
"""

import hashlib
import time
from typing import NamedTuple

import msgspec

from quire.frontend.detokenize import Detokenizer
from quire.frontend.stop import StopStream, StopStrings
from quire.frontend.tokenizer import Tokenizer
from quire.messages import Abort, AddRequest, ChoiceDelta
from quire.outputs import CompletionOutput, FlatLogprobs, Logprob, PromptLogprobs, RequestMetrics, RequestOutput
from quire.params import RequestOutputKind, SamplingParams
from quire.step import TokenLogprobs


class ChoiceUpdate(NamedTuple):
    """What a choice gained since its reader last looked."""

    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody calls on an update
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    finish_reason: str | None
    stop_reason: int | str | None


class RequestState:
    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        message: AddRequest,
        tokenizer: Tokenizer | None,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.params = params
        self.message = message  # what started it
        self.tokenizer = tokenizer
        self.metrics = RequestMetrics(arrival_time=time.time(), queued_ts=time.monotonic())
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.vector: list[float] = []  # of a request that wants one, when it is finished
        stops = StopStrings(params.stop)
        self.choices = [ChoiceState(idx, params, stops, tokenizer, prompt_token_ids) for idx in range(params.n)]
        self.num_unfinished = params.n
        self.finished = False
        self.num_accepted = self.num_rejected = 0  # tokens of its prediction that were verified, right and wrong ones

    def add_delta(self, delta: ChoiceDelta) -> Abort | None:
        """Takes a delta in; an Abort comes back when the text ended where the core could not see it."""
        choice = self.choices[delta.choice_idx]
        now = time.monotonic()
        if choice.finish_reason is not None:
            return None  # computed before the core knew that a stop string ended it
        if delta.prompt_logprobs:
            self.prompt_logprobs += delta.prompt_logprobs
        if delta.vector:
            self.vector = delta.vector
        self.num_accepted += delta.num_accepted
        self.num_rejected += delta.num_rejected
        metrics = self.metrics
        if not metrics.first_token_ts:
            metrics.num_cached_tokens = delta.num_cached_tokens
            metrics.scheduled_ts = metrics.queued_ts + delta.queue_s
        if delta.token_ids:
            if not metrics.first_token_ts:
                metrics.first_token_ts = now
                metrics.first_token_latency = now - metrics.queued_ts
            metrics.last_token_ts = now
        choice.add_delta(delta)
        if choice.finish_reason is None:
            return None
        self.num_unfinished -= 1
        self.finished = self.num_unfinished == 0
        if self.finished:
            self.metrics.finished_ts = now
        return Abort(self.request_id, delta.choice_idx) if delta.finish_reason is None else None

    def end(self, reason: str) -> None:
        """Ends every choice that is not finished, where it is."""
        for choice in self.choices:
            choice.finish_reason = choice.finish_reason or reason
        self.num_unfinished = 0
        self.finished = True
        self.metrics.finished_ts = time.monotonic()

    def updates(self) -> list[ChoiceUpdate]:
        """What is new since the last call, choice by choice."""
        return [update for choice in self.choices if (update := choice.update()) is not None]

    def restart(self) -> AddRequest:
        """The message that continues it, as far as it has come, on a fresh core."""
        params = self.params
        if len(self.prompt_logprobs) >= len(self.prompt_token_ids) - 1:
            params = msgspec.structs.replace(params, prompt_logprobs=None)  # all there
        else:
            self.prompt_logprobs = []
        unfinished = {choice.index: choice.token_ids for choice in self.choices if choice.finish_reason is None}
        return msgspec.structs.replace(self.message, params=params, choices=unfinished)

    def fingerprint(self) -> bytes:
        """Equal for two requests that make the engine do the same for the same owner, whenever they came."""
        same = msgspec.structs.replace(self.message, request_id="", seed=self.params.seed or 0, priority=0, choices={})
        return hashlib.sha256(msgspec.msgpack.encode(same)).digest()

    def output(self, updates: list[ChoiceUpdate] | None = None) -> RequestOutput:
        """A snapshot for the user; with `updates`, one of these alone where the request asks for deltas."""
        if updates is not None and self.params.output_kind is RequestOutputKind.DELTA:
            outputs = [self.choices[update.index].delta(update) for update in updates]
        else:
            outputs = [choice.output() for choice in self.choices]
        self.metrics.num_generation_tokens = sum(len(choice.token_ids) for choice in self.choices)
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            prompt_logprobs=self._prompt_logprobs(),
            outputs=outputs,
            finished=self.finished,
            metrics=self.metrics,
            num_cached_tokens=self.metrics.num_cached_tokens,
        )

    def _prompt_logprobs(self) -> PromptLogprobs | None:
        if self.params.prompt_logprobs is None:
            return None
        positions = [None, *(logprob_dict(entry, self.tokenizer) for entry in self.prompt_logprobs)]
        return FlatLogprobs(positions) if self.params.flat_logprobs else positions


class ChoiceState:
    """One of a request's answers, as it grows."""

    def __init__(
        self,
        index: int,
        params: SamplingParams,
        stops: StopStrings,
        tokenizer: Tokenizer | None,
        prompt_token_ids: list[int],
    ) -> None:
        self.index = index
        self.params = params
        self.tokenizer = tokenizer
        self.token_ids: list[int] = []
        self.texts: list[str] = []
        self.num_read = 0, 0, 0  # texts, tokens and logprobs that `update` has given
        self.told_end = False
        self.logprobs: list[TokenLogprobs] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.detokenizer: Detokenizer | None = None
        self.stop_stream: StopStream | None = None  # None: nothing to look for
        if tokenizer is not None and params.detokenize:
            self.detokenizer = Detokenizer(
                tokenizer,
                prompt_token_ids,
                skip_special_tokens=params.skip_special_tokens,
                spaces_between_special_tokens=params.spaces_between_special_tokens,
            )
            if params.stop:
                self.stop_stream = StopStream(
                    stops, include_stop=params.include_stop_str_in_output, min_tokens=params.min_tokens
                )

    def add_delta(self, delta: ChoiceDelta) -> None:
        detokenizer, stops = self.detokenizer, self.stop_stream
        stopped_by_token = delta.finish_reason == "stop" and not self.params.include_stop_str_in_output
        num_shown = len(delta.token_ids) - stopped_by_token  # the token that stopped it is no part of the text
        for idx, token_id in enumerate(delta.token_ids):
            self.token_ids.append(token_id)
            if detokenizer is None or idx >= num_shown:
                continue
            text = detokenizer.feed_one(token_id)
            if not text:
                continue
            if stops is None:
                self.texts.append(text)
                continue
            self.texts.append(stops.feed(text, len(self.token_ids)))
            if stops.matched is not None:
                self.finish_reason, self.stop_reason = "stop", stops.matched
                self.logprobs += delta.logprobs[: idx + 1]
                return
        if delta.logprobs:
            self.logprobs += delta.logprobs
        if delta.finish_reason is not None:
            self._finish(delta)

    def _finish(self, delta: ChoiceDelta) -> None:
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
        if self.detokenizer is None:
            return
        rest, stops = self.detokenizer.flush(), self.stop_stream
        if stops is None:
            self.texts.append(rest)
            return
        self.texts.append(stops.feed(rest, len(self.token_ids)))
        if stops.matched is not None:
            self.finish_reason, self.stop_reason = "stop", stops.matched
        self.texts.append(stops.flush())

    def update(self) -> ChoiceUpdate | None:
        """What is new since the last call; None if nothing is."""
        first_text, first_token, first_logprob = self.num_read
        self.num_read = len(self.texts), len(self.token_ids), len(self.logprobs)
        is_finished = self.finish_reason is not None
        if first_token == len(self.token_ids) and self.told_end is is_finished:
            return None
        self.told_end = is_finished
        new_texts = self.texts[first_text:]
        return ChoiceUpdate(
            self.index,
            new_texts[0] if len(new_texts) == 1 else "".join(new_texts),
            self.token_ids[first_token:],
            self.logprobs[first_logprob:],
            self.finish_reason,
            self.stop_reason,
        )

    @property
    def is_due(self) -> bool:
        """Whether its reader should look: at the first token, then at every `stream_interval` of them, and the end."""
        num_unread = len(self.token_ids) - self.num_read[1]
        if self.finish_reason is not None:
            return not self.told_end
        return num_unread >= (self.params.stream_interval or 1) or (self.num_read[1] == 0 and num_unread > 0)

    def output(self) -> CompletionOutput:
        """All there is so far."""
        return self._output("".join(self.texts), list(self.token_ids), self.logprobs)

    def delta(self, update: ChoiceUpdate) -> CompletionOutput:
        """What an update says."""
        return self._output(update.text, update.token_ids, update.logprobs)

    def _output(self, text: str, token_ids: list[int], entries: list[TokenLogprobs]) -> CompletionOutput:
        output = CompletionOutput(
            self.index, text, token_ids, finish_reason=self.finish_reason, stop_reason=self.stop_reason
        )
        if self.params.logprobs is not None:
            are_named = self.params.logprob_token_ids is not None
            positions = [logprob_dict(entry, self.tokenizer, are_named) for entry in entries]
            output.logprobs = FlatLogprobs(positions) if self.params.flat_logprobs else positions
            output.cumulative_logprob = sum(entry.logprob for entry in self.logprobs)
        return output


def logprob_dict(entry: TokenLogprobs, tokenizer: Tokenizer | None, are_named: bool = False) -> dict[int, Logprob]:
    """One position's logprobs by token id: the most likely ones and the token that was there.

    `are_named`: not the most likely ones, but some that the request named; their ranks are not known.
    """

    def word(token_id: int) -> str | None:
        return tokenizer.word(token_id) if tokenizer is not None else None

    found = {entry.token_id: Logprob(entry.logprob, entry.rank, word(entry.token_id))}
    for rank, (token_id, logprob) in enumerate(zip(entry.top_ids, entry.top_logprobs), 1):
        if token_id not in found:
            found[token_id] = Logprob(logprob, None if are_named else rank, word(token_id))
    return found
