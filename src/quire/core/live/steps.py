"""Steps as somebody who watches sees them: what each computed, how long core and device took, and a minute of that.

Made by `view.py` with the first watcher. Knows counts and times of steps, not requests.
"""

import time
from collections import deque
from typing import Any

import msgspec

from quire.core.pipeline import Launcher
from quire.executor.base import PendingStep
from quire.messages import EngineStats
from quire.step import Masks, StepPlan, StepResult

NUM_STEPS = 64
INTERVAL_S = 0.5  # of a point of the history
NUM_POINTS = 120
RATE_POINTS = 4  # that rates are of
RECENT_POINTS = 20  # that the acceptance of drafts is of
COLUMNS = ("prefill", "decode", "rows", "host_ms", "device_ms")
POINT_COLUMNS = ("prefill", "decode", "steps", "running", "waiting", "used", "host_ms", "device_ms", "preemptions")


class TimedExecutor:
    """Stands before the executor while somebody watches, and measures how long launching and waiting take."""

    def __init__(self, executor: Launcher) -> None:
        self.executor = executor
        self.launch_s = 0.0  # since it was last set to zero
        self.wait_s = 0.0
        self.launched: dict[int, float] = {}  # id of a step in flight -> when, by time.monotonic()

    def forward(self, plan: StepPlan) -> None:
        started = self._begin(plan)
        self.executor.forward(plan)
        self.launch_s += time.perf_counter() - started

    def sample(self, plan: StepPlan, masks: Masks | None = None) -> PendingStep:
        started = time.perf_counter()
        pending = self.executor.sample(plan, masks)
        self.launch_s += time.perf_counter() - started
        return TimedStep(self, pending)

    def launch(self, plan: StepPlan) -> PendingStep:
        started = self._begin(plan)
        pending = self.executor.launch(plan)
        self.launch_s += time.perf_counter() - started
        return TimedStep(self, pending)

    def _begin(self, plan: StepPlan) -> float:
        self.launched[plan.step_id] = time.monotonic()
        return time.perf_counter()


class TimedStep:
    def __init__(self, timed: TimedExecutor, pending: PendingStep) -> None:
        self.timed = timed
        self.pending = pending

    def result(self) -> StepResult:
        started = time.perf_counter()
        result = self.pending.result()
        self.timed.wait_s += time.perf_counter() - started
        return result


class Sums(msgspec.Struct):
    """Of a part of the history that is not over."""

    prefill: int = 0
    decode: int = 0
    steps: int = 0
    host_ms: float = 0.0
    device_ms: float = 0.0


class StepHistory:
    """The last steps one by one, and the last minute in points of half a second."""

    def __init__(self, now: float, stats: EngineStats) -> None:
        self.count = 0
        self.steps: deque[tuple[float, ...]] = deque(maxlen=NUM_STEPS)
        self.points: deque[tuple[float, ...]] = deque(maxlen=NUM_POINTS)
        self.drafts: deque[tuple[int, int]] = deque(maxlen=RECENT_POINTS)  # (verified, accepted) in each point
        self.sums = Sums()
        self.point_began = now
        self.seen = stats  # when the last point ended
        self._encoded: msgspec.Raw | None = None  # the points, until there is another

    def add(self, prefill: int, decode: int, rows: int, host_ms: float, device_ms: float) -> None:
        self.count += 1
        self.steps.append((prefill, decode, rows, round(host_ms, 2), round(device_ms, 2)))
        sums = self.sums
        sums.prefill += prefill
        sums.decode += decode
        sums.steps += 1
        sums.host_ms += host_ms
        sums.device_ms += device_ms

    def end_points(self, now: float, stats: EngineStats) -> None:
        """Ends the points whose time is over. After a step of several of them, its tokens are spread evenly."""
        num_points = int((now - self.point_began) / INTERVAL_S)
        if num_points <= 0:
            return
        self.point_began += num_points * INTERVAL_S
        sums, self.sums = self.sums, Sums()
        per_step = max(1, sums.steps)
        before, self.seen = self.seen, stats
        totals = sums.prefill, sums.decode, sums.steps, stats.num_preemptions - before.num_preemptions
        for idx in range(min(num_points, NUM_POINTS)):
            prefill, decode, steps, preemptions = (_share(total, idx, num_points) for total in totals)
            means = round(sums.host_ms / per_step, 2), round(sums.device_ms / per_step, 2)
            state = stats.num_running, stats.num_waiting, round(stats.kv_usage, 3)
            self.points.append((prefill, decode, steps, *state, *means, preemptions))
        drafted = stats.num_draft_tokens - before.num_draft_tokens
        self.drafts.append((drafted, sum(stats.accepted_drafts) - sum(before.accepted_drafts)))
        self._encoded = None

    def last_steps(self) -> dict[str, Any]:
        return {"count": self.count, **_columns(COLUMNS, self.steps)}

    def history(self) -> msgspec.Raw:
        if self._encoded is None:
            shown = {"interval_s": INTERVAL_S, **_columns(POINT_COLUMNS, self.points)}
            self._encoded = msgspec.Raw(msgspec.json.encode(shown))
        return self._encoded

    def rates(self) -> dict[str, float]:
        points = list(self.points)[-RATE_POINTS:]
        seconds = len(points) * INTERVAL_S or 1.0
        prefill, decode, steps = (round(sum(point[idx] for point in points) / seconds, 1) for idx in range(3))
        return {"prefill_tokens_s": prefill, "decode_tokens_s": decode, "steps_s": steps}

    def recent_acceptance(self) -> float | None:
        drafted = sum(verified for verified, _ in self.drafts)
        return round(sum(accepted for _, accepted in self.drafts) / drafted, 3) if drafted else None


def _share(total: int, idx: int, count: int) -> int:
    """Part `idx` of `count` of a total; together they are all of it."""
    return total * (idx + 1) // count - total * idx // count


def _columns(names: tuple[str, ...], rows: deque[tuple[float, ...]]) -> dict[str, Any]:
    return dict(zip(names, zip(*rows))) if rows else {name: () for name in names}
