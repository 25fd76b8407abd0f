"""Requests with a grammar: they wait here while it is compiled, then join the scheduler's line with a guide.

Owned by the engine once it knows the vocabulary. Also here is what guides add to a step after it was planned: masks,
which a step needs between its two launches, and forced tokens, which the next plan sends to the worker.
"""

from collections import deque

from quire.config import StructuredConfig
from quire.core.pipeline import Entry, PlannedStep
from quire.core.request import Request
from quire.executor.base import Executor
from quire.messages import ChoiceDelta, Constraint, Vocabulary
from quire.step import TOKEN, Masks, StepResult
from quire.structured.running.compiler import Compiler, Ticket
from quire.structured.running.guide import Guide
from quire.structured.running.masks import Masker

MAX_RUNNING_TO_FORCE = 8  # with more running requests, forcing tokens costs more time than the skipped steps save
IDLE_WAIT_S = 0.005  # how long an idle core sleeps before it looks for new messages


class RequestGuide(Guide):
    """The guide of a request. Where only one token can follow, the request gets it without asking the model."""

    def follow(self, request: Request, delta: ChoiceDelta, num_running: int) -> None:
        """Takes the new tokens of `delta`, and adds to it the tokens that must follow them."""
        if problem := self.advance(delta.token_ids):
            delta.finish_reason, delta.error = "error", problem
        if delta.finish_reason is not None or request.params.logprobs is not None:
            return
        if num_running > MAX_RUNNING_TO_FORCE:
            self.rest()  # a step in which some rows compute several tokens is slower for all
            return
        forced = self.forced()
        if request.num_sampling > TOKEN:
            # The step in flight verifies drafts, after which its keys and values are not those of forced tokens.
            request.num_drafts = 0 if forced else request.num_drafts  # the next one leaves room for them
            return
        if len(forced) <= request.num_sampling and not request.eos_ids.intersection(forced):
            return  # the step in flight computes it anyway
        forced = list(forced)  # may be a list of the constraint's, and `force` cuts it where the request ends
        delta.finish_reason, delta.stop_reason = request.force(forced)
        self.advance(forced)
        delta.token_ids = delta.token_ids + forced


class Guides:
    def __init__(self, vocabulary: Vocabulary, compiler: Compiler, executor: Executor) -> None:
        self.stop_ids = vocabulary.stop_ids
        self.masker = Masker(vocabulary.num_words, executor.mask_memory)
        self.compiler = compiler
        self.waiting: deque[tuple[Request, Constraint, Ticket | None]] = deque()

    @classmethod
    def of(cls, vocabulary: Vocabulary, config: StructuredConfig, executor: Executor) -> "Guides":
        compiler = Compiler(config.structured_outputs_backend, vocabulary, timeout_s=config.grammar_timeout_s)
        return cls(vocabulary, compiler, executor)

    def add(self, request: Request, constraint: Constraint) -> None:
        ticket = self.compiler.submit(constraint.grammar) if constraint.grammar is not None else None
        self.waiting.append((request, constraint, ticket))

    def abort(self, request_id: str, choice_idx: int | None) -> None:
        def is_aborted(request: Request) -> bool:
            return request.request_id == request_id and choice_idx in (None, request.choice_idx)

        self.waiting = deque(entry for entry in self.waiting if not is_aborted(entry[0]))

    @property
    def num_tokens(self) -> int:
        """Of the requests that wait."""
        return sum(len(request.token_ids) for request, _, _ in self.waiting)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting)

    def take_decided(self) -> tuple[list[Request], list[tuple[Request, str]]]:
        """Requests that can run now, and those that never can, with the reason."""
        ready: list[Request] = []
        refused: list[tuple[Request, str]] = []
        still_waiting: deque[tuple[Request, Constraint, Ticket | None]] = deque()
        for request, constraint, ticket in self.waiting:
            if ticket is not None and not ticket.done:
                still_waiting.append((request, constraint, ticket))
            elif ticket is not None and ticket.error is not None:
                refused.append((request, str(ticket.error)))
            else:
                grammar = ticket.grammar if ticket is not None else None
                matcher = grammar.matcher() if grammar is not None else None
                request.guide = RequestGuide(matcher, constraint.thinking, self.stop_ids)
                request.guide.advance(request.token_ids[request.num_prompt_tokens :])
                ready.append(request)
        self.waiting = still_waiting
        return ready, refused

    # -- what a step needs between its launches ------------------------------------------------------------------

    def are_known(self, step: PlannedStep) -> bool:
        """Whether guides have seen all tokens before those that `step`, the newest, chooses."""
        return not any(entry.request.num_sampling > entry.produces for _, entry, _ in _guided(step))

    def masks(self, step: PlannedStep) -> Masks | None:
        """The tokens that grammars allow in the step; None if no row has a grammar."""
        guided = [(place, guide, entry.drafts) for place, entry, guide in _guided(step)]
        return self.masker.masks(guided, step.ahead) if guided or step.ahead is not None else None

    def look_ahead(self, step: PlannedStep, result: StepResult, waiting: PlannedStep) -> None:
        """Shows guides the tokens of a finished step, and starts to fill the masks of `waiting`, the step behind it.

        The scheduler applies the finished step's results later, request by request. Masks of rows that got several
        tokens, or verify drafts, wait until then.
        """
        chosen = {
            entry.request: token_ids[0]
            for entry, token_ids in zip(step.entries, result.token_ids)
            if entry.request.guide is not None and entry.is_wanted and len(token_ids) == 1
        }
        tokens = [
            (place, guide, chosen[entry.request])
            for place, entry, guide in _guided(waiting)
            if entry.request in chosen and entry.produces == TOKEN
        ]
        waiting.ahead = self.masker.begin(tokens, waiting.plan.num_samples)

    def wait(self) -> None:
        """Waits for a grammar, for a moment at most."""
        if tickets := [ticket for *_, ticket in self.waiting if ticket is not None]:
            tickets[0].wait(IDLE_WAIT_S)

    def close(self) -> None:
        self.compiler.close()
        self.masker.close()


def _guided(step: PlannedStep) -> list[tuple[int, Entry, RequestGuide]]:
    """Entries of requests with a grammar whose tokens are still wanted.

    Each comes with the index of its first position at which a token is chosen, among the step's, and with its guide.
    """
    found = []
    place = 0
    for entry in step.entries:
        guide = entry.request.guide
        if guide is not None and entry.is_wanted:
            found.append((place, entry, guide))
        place += abs(entry.produces)
    return found
