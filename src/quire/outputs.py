"""What a user gets back, with vLLM's field names.

Built by `frontend/`, returned by `LLM.generate` and the server.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Logprob:
    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


class FlatLogprobs(Sequence[dict[int, Logprob]]):
    """The same as a list of dicts, kept in a few long lists: quick to make, and little work for Python's collector.

    Entries `start_indices[i]` to `end_indices[i]` of the long lists are those of position i.
    """

    def __init__(self, positions: Iterable[dict[int, Logprob] | None] = ()) -> None:
        self.start_indices: list[int] = []
        self.end_indices: list[int] = []
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.ranks: list[int | None] = []
        self.decoded_tokens: list[str | None] = []
        for position in positions:
            self.append(position)

    def append(self, position: dict[int, Logprob] | None) -> None:
        self.start_indices.append(len(self.token_ids))
        for token_id, entry in (position or {}).items():
            self.token_ids.append(token_id)
            self.logprobs.append(entry.logprob)
            self.ranks.append(entry.rank)
            self.decoded_tokens.append(entry.decoded_token)
        self.end_indices.append(len(self.token_ids))

    def __len__(self) -> int:
        return len(self.start_indices)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return FlatLogprobs(self[idx] for idx in range(*index.indices(len(self))))
        entries = range(self.start_indices[index], self.end_indices[index])
        return {
            self.token_ids[idx]: Logprob(self.logprobs[idx], self.ranks[idx], self.decoded_tokens[idx])
            for idx in entries
        }

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FlatLogprobs) and vars(self) == vars(other)


SampleLogprobs = list[dict[int, Logprob]] | FlatLogprobs
PromptLogprobs = list[dict[int, Logprob] | None] | FlatLogprobs  # nothing predicts the first token: None or empty


@dataclass
class CompletionOutput:
    """One of the `n` answers to a prompt."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: SampleLogprobs | None = None
    finish_reason: str | None = None  # "stop", "length", "repetition" or "abort"
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class RequestMetrics:
    """When things happened. Names that end in _ts are `time.monotonic()` seconds, 0 for what has not happened yet."""

    arrival_time: float = 0.0  # by the clock on the wall, `time.time()`
    queued_ts: float = 0.0  # when it arrived
    scheduled_ts: float = 0.0  # its first step
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    finished_ts: float = 0.0
    first_token_latency: float = 0.0  # seconds from its arrival to its first token
    num_generation_tokens: int = 0  # of all choices together
    num_cached_tokens: int = 0


@dataclass
class RequestOutput:
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: PromptLogprobs | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    num_cached_tokens: int = 0


@dataclass
class BeamSearchSequence:
    tokens: list[int]  # of the prompt, and after it
    logprobs: list[dict[int, Logprob]]  # of each token after the prompt
    cum_logprob: float = 0.0
    text: str | None = None  # of all tokens
    finish_reason: str | None = None  # "stop": it ended by itself; "length"
    stop_reason: int | str | None = None


@dataclass
class BeamSearchOutput:
    sequences: list[BeamSearchSequence]  # the best ones, best first
