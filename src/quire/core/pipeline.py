"""Steps in flight: up to `depth` are launched before the oldest is waited for.

Used by the engine's loop. Knows order, not content: what a step means is the scheduler's business.
"""

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from quire.core.request import Request
from quire.executor.base import Executor, PendingStep
from quire.step import Masks, StepPlan, StepResult
from quire.utils.flight import NoRecorder

if TYPE_CHECKING:
    from quire.structured.masks import Ahead, Masker


class Entry(NamedTuple):
    """A request's part in a step, as it was when planned."""

    request: Request
    num_tokens: int
    samples: bool
    position: int  # of the token it chooses
    num_preemptions: int  # differs from the request's own if it was preempted since


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
        self.masker: Masker | None = None  # set where requests have guides
        self.steps: deque[PlannedStep] = deque()

    @property
    def has_room(self) -> bool:
        """A step can be launched once the one before has chosen its tokens, or can: all steps before that are applied."""
        return len(self.steps) < self.depth and (len(self.steps) < 2 or self.steps[-1].pending is not None)

    @property
    def newest_step(self) -> int | None:
        """Id of the last step launched and not applied: blocks let go now may be named by it."""
        return self.steps[-1].plan.step_id if self.steps else None

    def submit(self, step: PlannedStep) -> None:
        """Two launches: where a grammar must see the tokens of the step before, the second waits for them."""
        self.sample()
        self._record(*self.steps, step)
        self.executor.forward(step.plan)
        self.steps.append(step)
        self.sample()

    def sample(self) -> None:
        """Launches the newest step's second half, if that has not been done and all that it needs is known."""
        if not self.steps or (step := self.steps[-1]).pending is not None:
            return
        guided = [e for e in step.entries if e.samples and e.request.guide is not None] if self.masker is not None else ()
        if len(self.steps) > 1 and any(e.position > len(e.request.token_ids) for e in guided if not e.request.finished):
            return
        step.pending = self.executor.sample(step.plan, self._masks(step) if guided else None)

    def _masks(self, step: PlannedStep) -> Masks | None:
        """What grammars allow. A token that one of them knew before needs no mask: nobody reads what is chosen instead."""
        choosing = (entry for entry in step.entries if entry.samples)
        wanted = [
            (place, entry.request.guide) for place, entry in enumerate(choosing)
            if entry.request.guide is not None and not entry.request.finished and entry.position == len(entry.request.token_ids)
        ]  # fmt: skip
        return self.masker.masks(wanted, step.ahead) if wanted or step.ahead is not None else None

    def look_ahead(self, step: PlannedStep, result: StepResult) -> None:
        """Grammars see the tokens of a step that was waited for, all at once, before the scheduler takes them in one by one."""
        if self.masker is None or not self.steps or self.steps[-1].pending is not None:
            return
        came = {}
        for (request, _, samples, position, _), token_ids in zip(step.entries, result.token_ids):
            if samples and request.guide is not None and position == len(request.token_ids) and not request.finished:
                came[request] = token_ids[0]
        choosing = [entry for entry in self.steps[-1].entries if entry.samples]
        tokens = [
            (place, request.guide, came[request]) for place, (request, _, _, position, _) in enumerate(choosing)
            if request in came and position == len(request.token_ids) + 1
        ]  # fmt: skip
        self.steps[-1].ahead = self.masker.begin(tokens, len(choosing))

    def wait(self) -> tuple[PlannedStep, StepResult]:
        if len(self.steps) == 1:
            self.sample()
        step = self.steps.popleft()
        result = step.pending.result()
        self._record(*self.steps)
        return step, result

    def _record(self, *steps: PlannedStep) -> None:
        self.recorder.write(entry.request.request_id for step in steps for entry in step.entries)
