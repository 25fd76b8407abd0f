"""Steps in flight: up to `depth` are launched before the oldest is waited for.

Used by the engine's loop. Knows the order of steps, not their contents: those are the scheduler's.
"""

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import msgspec

from quire.core.request import Request, Status
from quire.errors import EngineError
from quire.executor.base import PendingStep
from quire.step import NOTHING, TOKEN, Masks, StepPlan, StepResult
from quire.utils.flight import FlightRecorder, NoRecorder

if TYPE_CHECKING:  # these import grammar engines, which are large
    from quire.core.guides import Guides
    from quire.structured.running.masks import Ahead


class Entry(msgspec.Struct, gc=False):
    """A request's part in a step, as it was when the step was planned."""

    request: Request
    num_tokens: int
    produces: int
    num_preemptions: int  # differs from the request's own if it was preempted since
    num_forced: int  # differs from the request's own if it got forced tokens since
    proposed: list[int] = []  # drafts of the core

    @property
    def drafts(self) -> list[int]:
        """What the step verifies, of a request with a grammar, once the step before it has been applied."""
        return self.proposed or self.request.drafts[: max(0, self.produces - TOKEN)]

    @property
    def is_wanted(self) -> bool:
        """Whether the request still needs what this entry produces."""
        request = self.request
        if self.produces == NOTHING or request.status is Status.FINISHED:
            return False
        return self.num_forced == request.num_forced


@dataclass
class PlannedStep:
    plan: StepPlan
    entries: list[Entry]
    pending: PendingStep | None = None  # set by the second launch
    ahead: "Ahead | None" = None  # masks that threads began to fill before the second launch


class Launcher(Protocol):
    """What is needed of an executor here."""

    def forward(self, plan: StepPlan) -> None: ...

    def sample(self, plan: StepPlan, masks: Masks | None = None) -> PendingStep: ...

    def launch(self, plan: StepPlan) -> PendingStep: ...


class Pipeline:
    def __init__(self, executor: Launcher, depth: int, recorder: NoRecorder | FlightRecorder = NoRecorder()) -> None:
        self.executor = executor
        self.depth = depth
        self.recorder = recorder  # written before a step is launched, so that a crash can be traced to its requests
        self.late_inputs: Guides | None = None  # gives the masks that steps need between their launches
        self.steps: deque[PlannedStep] = deque()

    @property
    def has_room(self) -> bool:
        return len(self.steps) < self.depth

    @property
    def newest_step(self) -> int | None:
        """Id of the last step launched and not applied. It may still use blocks that are released now."""
        return self.steps[-1].plan.step_id if self.steps else None

    def submit(self, step: PlannedStep) -> None:
        """Launches a step's forward pass, and its sampling unless that needs tokens of the step before."""
        self.sample()
        self._record(*self.steps, step)
        if self.late_inputs is None:
            step.pending = self.executor.launch(step.plan)
        else:
            self.executor.forward(step.plan)
        self.steps.append(step)
        self.sample()

    def sample(self) -> None:
        """Launches the newest step's sampling, if that is still to be done and all that it needs is known."""
        step, late = self.waiting, self.late_inputs
        if step is None or late is None:
            return
        if len(self.steps) == 1 or late.are_known(step):
            step.pending = self.executor.sample(step.plan, late.masks(step))

    @property
    def waiting(self) -> PlannedStep | None:
        """The step whose sampling is not launched yet."""
        return self.steps[-1] if self.steps and self.steps[-1].pending is None else None

    def wait(self) -> tuple[PlannedStep, StepResult]:
        """Waits for the oldest step."""
        if len(self.steps) == 1:
            self.sample()
        step = self.steps.popleft()
        if step.pending is None:
            raise EngineError("a step was waited for before its tokens were sampled: this is a bug in the pipeline")
        result = step.pending.result()
        self._record(*self.steps)
        if self.late_inputs is not None and self.waiting is not None:
            self.late_inputs.look_ahead(step, result, self.waiting)
        return step, result

    def _record(self, *steps: PlannedStep) -> None:
        self.recorder.write(entry.request.request_id for step in steps for entry in step.entries)
