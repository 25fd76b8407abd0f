"""Requests with a grammar: they wait here while it is compiled, holding nobody up, and join the scheduler's line with a guide.

Owned by the engine from the first such request on. Also what guides bring late: masks, which a step needs between its launches,
and tokens that must follow, which the next plan tells the worker.
"""

from collections import deque

from quire.config import StructuredConfig
from quire.core.pipeline import Entry, PlannedStep
from quire.core.request import Request
from quire.executor.base import Executor
from quire.messages import ChoiceDelta, Constraint, Vocabulary
from quire.step import Masks, StepResult
from quire.structured.running.compiler import Compiler, Ticket
from quire.structured.running.guide import Guide
from quire.structured.running.masks import Masker

FEW = 8  # running requests, for which skipping steps pays
PATIENCE_S = 0.005  # how long an idle core sleeps before it looks for new messages


class RequestGuide(Guide):
    """The guide of a request: also takes tokens without asking the model, where only one can follow."""

    def follow(self, request: Request, delta: ChoiceDelta, num_running: int) -> None:
        """The new tokens, and those that must follow them."""
        if problem := self.advance(delta.token_ids):
            delta.finish_reason, delta.error = "error", problem
        if delta.finish_reason is not None or request.params.logprobs is not None:
            return
        if num_running > FEW:
            return self.rest()  # a step in which some rows compute several tokens is slower for all
        forced = self.forced()
        if len(forced) <= request.num_sampling and not request.eos_ids.intersection(forced):
            return  # the step in flight computes it anyway
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
        return cls(
            vocabulary,
            Compiler(config.structured_outputs_backend, vocabulary, timeout_s=config.grammar_timeout_s),
            executor,
        )

    def add(self, request: Request, constraint: Constraint) -> None:
        ticket = self.compiler.submit(constraint.grammar) if constraint.grammar is not None else None
        self.waiting.append((request, constraint, ticket))

    def abort(self, request_id: str, choice_idx: int | None) -> None:
        self.waiting = deque(
            entry for entry in self.waiting
            if entry[0].request_id != request_id or (choice_idx is not None and entry[0].choice_idx != choice_idx)
        )  # fmt: skip

    @property
    def has_work(self) -> bool:
        return bool(self.waiting)

    def take_decided(self) -> tuple[list[Request], list[tuple[Request, str]]]:
        """Requests that can run now, and those that cannot ever, with the reason."""
        ready, refused, still = [], [], deque()
        for request, constraint, ticket in self.waiting:
            if ticket is not None and not ticket.done:
                still.append((request, constraint, ticket))
            elif ticket is not None and ticket.error is not None:
                refused.append((request, str(ticket.error)))
            else:
                matcher = ticket.grammar.matcher() if ticket is not None else None
                request.guide = RequestGuide(matcher, constraint.thinking, self.stop_ids)
                request.guide.advance(request.token_ids[request.num_prompt_tokens :])
                ready.append(request)
        self.waiting = still
        return ready, refused

    # -- what a step needs between its launches ------------------------------------------------------------------

    def are_known(self, step: PlannedStep) -> bool:
        """Whether guides have seen all tokens before those that the step, the newest, chooses."""
        return not any(entry.request.num_sampling > entry.produces for _, entry in _guided(step))

    def masks(self, step: PlannedStep) -> Masks | None:
        """What grammars allow. Tokens that nobody wants need no mask."""
        guided = [(place, entry.request.guide) for place, entry in _guided(step)]
        return self.masker.masks(guided, step.ahead) if guided or step.ahead is not None else None

    def look_ahead(self, step: PlannedStep, result: StepResult, waiting: PlannedStep) -> None:
        """Guides see the tokens of a step that was waited for, all at once, before the scheduler takes them in one by one; the masks
        of the step that is `waiting` for them are begun."""
        chosen = {
            entry.request: token_ids[0]
            for entry, token_ids in zip(step.entries, result.token_ids)
            if entry.request.guide is not None and entry.is_wanted
        }
        tokens = [
            (place, entry.request.guide, chosen[entry.request])
            for place, entry in _guided(waiting)
            if entry.request in chosen
        ]
        waiting.ahead = self.masker.begin(tokens, sum(map(bool, waiting.plan.produces)))

    def wait(self) -> None:
        """For a grammar, a moment at most."""
        if tickets := [ticket for *_, ticket in self.waiting if ticket is not None]:
            tickets[0].wait(PATIENCE_S)

    def close(self) -> None:
        self.compiler.close()
        self.masker.close()


def _guided(step: PlannedStep) -> list[tuple[int, Entry]]:
    """What somebody wants under a grammar, with its place among the rows that produce something."""
    producing = (entry for entry in step.entries if entry.produces)
    return [
        (place, entry) for place, entry in enumerate(producing) if entry.request.guide is not None and entry.is_wanted
    ]
