"""Steps in flight: up to `depth` are launched before the oldest is waited for.

Used by the engine's loop. Knows order, not content: what a step means is the scheduler's business.
"""

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from quire.core.request import Request
from quire.executor.base import Executor, PendingStep
from quire.step import StepPlan, StepResult
from quire.utils.flight import NoRecorder


class Entry(NamedTuple):
    """A request's part in a step, as it was when planned."""

    request: Request
    num_tokens: int
    samples: bool
    num_preemptions: int  # differs from the request's own if it was preempted since


@dataclass
class PlannedStep:
    plan: StepPlan
    entries: list[Entry]
    pending: PendingStep | None = None


class Pipeline:
    def __init__(self, executor: Executor, depth: int, recorder: NoRecorder = NoRecorder()) -> None:
        self.executor = executor
        self.depth = depth
        self.recorder = recorder  # told before a step is launched, so that a crash can be traced to its requests
        self.steps: deque[PlannedStep] = deque()

    @property
    def has_room(self) -> bool:
        return len(self.steps) < self.depth

    @property
    def newest_step(self) -> int | None:
        """Id of the last step launched and not applied: blocks let go now may be named by it."""
        return self.steps[-1].plan.step_id if self.steps else None

    def submit(self, step: PlannedStep) -> None:
        """Two launches, so that inputs that come late (grammar masks) can arrive between them."""
        self._record(*self.steps, step)
        self.executor.forward(step.plan)
        step.pending = self.executor.sample(step.plan)
        self.steps.append(step)

    def wait(self) -> tuple[PlannedStep, StepResult]:
        step = self.steps.popleft()
        result = step.pending.result()
        self._record(*self.steps)
        return step, result

    def _record(self, *steps: PlannedStep) -> None:
        self.recorder.write(entry.request.request_id for step in steps for entry in step.entries)
