"""Requests whose grammar is being compiled wait here, holding nobody up; then they join the scheduler's line with a guide.

Owned by the engine from the first such request on.
"""

from collections import deque

from quire.config import StructuredConfig
from quire.core.request import Request
from quire.executor.base import Executor
from quire.messages import Constraint, Vocabulary
from quire.structured.compiler import Compiler, Ticket
from quire.structured.guide import Guide
from quire.structured.masks import Masker

PATIENCE_S = 0.005  # how long an idle core sleeps before it looks for new messages


class Guides:
    def __init__(self, vocabulary: Vocabulary, compiler: Compiler, executor: Executor) -> None:
        self.stop_ids = vocabulary.stop_ids
        self.masker = Masker(vocabulary.num_words, executor.mask_memory)
        self.compiler = compiler
        self.waiting: deque[tuple[Request, Constraint, Ticket | None]] = deque()

    @classmethod
    def of(cls, vocabulary: Vocabulary, config: StructuredConfig, executor: Executor) -> "Guides":
        return cls(vocabulary, Compiler(config.structured_outputs_backend, vocabulary, timeout_s=config.grammar_timeout_s), executor)

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

    def take(self) -> tuple[list[Request], list[tuple[Request, str]]]:
        """Requests that can run now, and those that cannot ever, with the reason."""
        ready, refused, still = [], [], deque()
        for request, constraint, ticket in self.waiting:
            if ticket is not None and not ticket.done:
                still.append((request, constraint, ticket))
            elif ticket is not None and ticket.error is not None:
                refused.append((request, str(ticket.error)))
            else:
                matcher = ticket.grammar.matcher() if ticket is not None else None
                request.guide = Guide(matcher, constraint.thinking, self.stop_ids)
                request.guide.advance(request.token_ids[request.num_prompt_tokens :])
                ready.append(request)
        self.waiting = still
        return ready, refused

    def wait(self) -> None:
        """For a grammar, a moment at most."""
        if tickets := [ticket for *_, ticket in self.waiting if ticket is not None]:
            tickets[0].wait(PATIENCE_S)

    def close(self) -> None:
        self.compiler.close()
        self.masker.close()
