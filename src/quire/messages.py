"""The structs frontend and core exchange: by calls within one process, over a socket between two.

A choice of a request (`n` > 1) is a core request of its own, named by (request_id, choice_idx); what the choices have
in common is sent once. The frontend keeps everything needed to send an AddRequest again, with the tokens so far, to a
fresh core.
"""

import msgspec

from quire.config import EngineConfig
from quire.params import SamplingParams
from quire.step import TokenLogprobs
from quire.structured.spec import GrammarSpec


class Thinking(msgspec.Struct, array_like=True):
    """How a model's thinking is told from its answer, in tokens."""

    is_open: bool  # the prompt already opened it
    start_ids: list[int]  # the tokens that open it, at the beginning of the output; empty: only the prompt can open it
    end_ids: list[int]  # the tokens that close it
    budget: int | None = None  # after so many tokens it is closed by force


class Constraint(msgspec.Struct, array_like=True):
    """What an answer must look like. The grammar applies to what comes after the thinking."""

    grammar: GrammarSpec | None = None
    thinking: Thinking | None = None


class AddRequest(msgspec.Struct, array_like=True, tag="add"):
    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams  # complete: max_tokens is a number
    seed: int  # params.seed, or one drawn for this request
    # Index of each choice to be computed -> the tokens it generated before an engine restart.
    choices: dict[int, list[int]] = msgspec.field(default_factory=lambda: {0: []})
    eos_ids: list[int] = []
    bad_words: list[list[int]] = []
    priority: int = 0  # lower runs earlier
    cache_salt: str = ""
    constraint: Constraint | None = None
    wants_vector: bool = False  # the last prompt token's final hidden state, instead of an answer
    prediction: list[int] = []  # what the answer may be like
    owner: str = ""  # who sent it: a digest of the API key, empty where there are no keys


class Vocabulary(msgspec.Struct, array_like=True, tag="vocabulary"):
    """The bytes of each token, for grammars; sent to a core before its first request with a constraint."""

    tokens: list[bytes]  # by id
    special_ids: list[int]  # tokens that are no text
    stop_ids: list[int]  # tokens that end an answer
    size: int  # number of the model's logits: at least as many as there are tokens

    @property
    def num_words(self) -> int:
        """How many words of 32 tokens a mask has."""
        return -(-self.size // 32)


class Abort(msgspec.Struct, array_like=True, tag="abort"):
    request_id: str
    choice_idx: int | None = None  # None: every choice


class Check(msgspec.Struct, array_like=True, tag="check"):
    """Asks the core to check that its own bookkeeping is consistent, for tests and soaks."""


class ResetPrefixCache(msgspec.Struct, array_like=True, tag="reset_prefix_cache"):
    """Asks the core to forget what it has cached of prompts. It does not while requests hold blocks, unless told so."""

    reset_running_requests: bool = False  # these then compute their tokens again


class Sleep(msgspec.Struct, array_like=True, tag="sleep"):
    """Asks the core to give the device's memory back. Requests that it has wait until it is woken up."""

    keep_weights: bool = True  # in the host's memory, where the device has its own; else they are read again


class WakeUp(msgspec.Struct, array_like=True, tag="wake_up"):
    """Asks a core that sleeps to take its memory and go on."""


class Hold(msgspec.Struct, array_like=True, tag="hold"):
    """Asks the core to compute nothing, or to go on. Requests stay where they are meanwhile, with their blocks."""

    is_held: bool = True


class Watch(msgspec.Struct, array_like=True, tag="watch"):
    """Somebody watches the engine from now on, or nobody any more: whether the core sends a LiveUpdate now and then."""

    is_on: bool


class ChoiceDelta(msgspec.Struct, array_like=True, gc=False):
    """What one choice gained in a step."""

    request_id: str
    choice_idx: int
    token_ids: list[int]
    finish_reason: str | None = None  # "stop", "length", "repetition", or "error": the core could not go on with it
    stop_reason: int | str | None = None  # the stop token, when it was not eos; or why else it ended
    logprobs: list[TokenLogprobs] = []
    prompt_logprobs: list[TokenLogprobs] = []
    num_cached_tokens: int = 0  # with the first token
    queue_s: float = 0.0  # how long it waited for its first step; with the first token
    error: str = ""  # with "error": what is wrong with the request, if that is the reason
    vector: list[float] | None = None  # if the request wants one; with its last delta
    # Tokens of its prediction that were verified in the step, and those that were wrong.
    num_accepted: int = 0
    num_rejected: int = 0


class EngineStats(msgspec.Struct, array_like=True, gc=False):
    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0  # share of blocks in use
    num_preemptions: int = 0
    prefix_queries: int = 0  # tokens looked up in the prefix cache since the start
    prefix_hits: int = 0  # of these, found there
    step_tokens: int = 0
    # Since the start: times that drafts were verified, how many drafts, and of each place how many were accepted.
    num_drafts: int = 0
    num_draft_tokens: int = 0
    accepted_drafts: list[int] = []
    num_deferred: int = 0  # of those that wait: for their grammar
    # Counted only by a core that is one of several, among which the frontend chooses.
    num_received: int = 0  # requests since the start
    num_to_compute: int = 0  # known tokens of these that no step has been given yet, as far as they are not cached


class StepOutputs(msgspec.Struct, array_like=True, tag="outputs", gc=False):
    """All that happened in one step, as one message."""

    deltas: list[ChoiceDelta]
    stats: EngineStats
    step_s: float = 0.0  # 0: a sign of life of an idle core


class Ready(msgspec.Struct, array_like=True, tag="ready"):
    """The core takes requests from now on."""

    num_tokens: int  # how many fit into the KV cache
    prefix_block: int = 0  # tokens of the blocks that `Prefixes` tells of; 0: it tells of none
    hit_unit: int = 0  # tokens: a hit is a multiple of this


class Prefixes(msgspec.Struct, array_like=True, tag="prefixes"):
    """Which blocks can be found in the prefix cache of a core that is one of several, since it last said so.

    Digests of `kv/prefix.py`, one after the other."""

    is_reset: bool  # nothing that was said before holds any more
    came: bytes
    went: bytes


class Failed(msgspec.Struct, array_like=True, tag="failed"):
    """The core could not start; `kind` names an exception of errors.py."""

    kind: str
    message: str


class Answer(msgspec.Struct, array_like=True, tag="answer"):
    """To a question; answers come in the order of the questions."""

    problem: str = ""  # what is wrong, or why it was not done; empty: all is well


class LiveUpdate(msgspec.Struct, array_like=True, tag="live"):
    """What somebody who watches is shown of the core: JSON, passed on as it is."""

    body: bytes


Question = Check | ResetPrefixCache | Sleep | WakeUp | Hold  # the core answers each, between two steps
ToCore = AddRequest | Vocabulary | Abort | Watch | Question
FromCore = Ready | Failed | StepOutputs | Answer | LiveUpdate | Prefixes


class CoreSetup(msgspec.Struct):
    """What a core process is told when it starts, over its standard input."""

    config: EngineConfig
    address: str  # of the frontend's socket
    recorder: str  # path of the flight recorder
    is_asleep: bool = False  # it loads nothing before it is woken up
