"""Steps in flight: up to `depth` are launched before the oldest is waited for.

Used by the engine's loop. Knows order, not content: what a step means is the scheduler's business.
"""

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from quire.core.request import Request
from quire.executor.base import Executor, PendingStep
from quire.step import NOTHING, StepPlan, StepResult
from quire.utils.flight import NoRecorder

if TYPE_CHECKING:  # they come with grammar engines, which are large
    from quire.core.guides import Guides
    from quire.structured.running.masks import Ahead


class Entry(NamedTuple):
    """A request's part in a step, as it was when planned."""

    request: Request
    num_tokens: int
    produces: int
    num_preemptions: int  # differs from the request's own if it was preempted since
    num_forced: int  # differs from the request's own if it got tokens since that no step chose

    @property
    def is_wanted(self) -> bool:
        """Does anybody still want what it produces?"""
        request = self.request
        return self.produces != NOTHING and not request.finished and self.num_forced == request.num_forced


@dataclass
class PlannedStep:
    plan: StepPlan
    entries: list[Entry]
    pending: PendingStep | None = None
    ahead: "Ahead | None" = None  # masks that are made before the rest


class Pipeline:
    def __init__(self, executor: Executor, depth: int, recorder: NoRecorder = NoRecorder()) -> None:
        self.executor = executor
        self.depth = depth
        self.recorder = recorder  # told before a step is launched, so that a crash can be traced to its requests
        self.late_inputs: Guides | None = None  # what steps wait for between their launches; None: for nothing
        self.steps: deque[PlannedStep] = deque()

    @property
    def has_room(self) -> bool:
        return len(self.steps) < self.depth

    @property
    def newest_step(self) -> int | None:
        """Id of the last step launched and not applied: blocks let go now may be named by it."""
        return self.steps[-1].plan.step_id if self.steps else None

    def submit(self, step: PlannedStep) -> None:
        """Two launches: the second waits where it needs what the step before gives."""
        self.sample()
        self._record(*self.steps, step)
        self.executor.forward(step.plan)
        self.steps.append(step)
        self.sample()

    def sample(self) -> None:
        """Launches the newest step's second half, if that has not been done and all that it needs is known."""
        step, late = self.waiting, self.late_inputs
        if step is None or (late is not None and len(self.steps) > 1 and not late.are_known(step)):
            return
        step.pending = self.executor.sample(step.plan, late.masks(step) if late is not None else None)

    @property
    def waiting(self) -> PlannedStep | None:
        """The step whose second half is not launched yet."""
        return self.steps[-1] if self.steps and self.steps[-1].pending is None else None

    def wait(self) -> tuple[PlannedStep, StepResult]:
        if len(self.steps) == 1:
            self.sample()
        step = self.steps.popleft()
        result = step.pending.result()
        self._record(*self.steps)
        if self.late_inputs is not None and self.waiting is not None:
            self.late_inputs.look_ahead(step, result, self.waiting)
        return step, result

    def _record(self, *steps: PlannedStep) -> None:
        self.recorder.write(entry.request.request_id for step in steps for entry in step.entries)
