"""The server with a watch on its event loop: what runs on the loop in one piece, and how much CPU time that costs.

    LOOP_WATCH=FILE python -m tests.loop_watch serve --executor echo

runs `quire serve` in this very process. A timer on the loop fires in every turn, a millisecond apart when the loop is
idle; a piece is what happened between two turns. Its cost is the CPU time in which the loop could not turn:

- the CPU time of the loop's own thread, and
- the CPU time of other threads while the loop's thread waited for the interpreter lock: time in which it neither
  computed, nor was kept from a core by other processes (the kernel counts that), nor slept until its timer. Threads
  that compute without the lock, such as tokenizers, do not make it wait and are not counted.

So a busy machine makes no piece longer. Pieces from 5 ms on are written to FILE, one JSON object per line. Those
above 25 ms also go to standard error, with the stack of the thread that had the lock, taken by a second thread while
the loop stood still.
"""

import asyncio
import json
import os
import sys
import threading
import time
import traceback
from collections import Counter, deque
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import uvloop

TICK_S = 0.001
NOTED_S = 0.005
LIMIT_S = 0.025
STUCK_S = 0.008  # without a turn; then stacks are taken
SAMPLE_S = 0.002
MAX_FRAMES = 8
# The outermost frames of every stack, which are not shown.
OUTER = {"runners.py", "run.py", "serve.py", "cli.py", "loop_watch.py", "threading.py", "<frozen runpy>"}


class Piece(NamedTuple):
    """What kept the loop from turning."""

    at_s: float  # time.time() when it was over
    cost_s: float
    loop_s: float  # of the cost, the loop's own thread
    others_s: float
    stack: list[str]  # of the thread that had the lock, innermost first; the one most often seen

    def __str__(self) -> str:
        where = " < ".join(self.stack) or "C code, in which no stack could be taken"
        return f"{self.cost_s * 1000:.0f} ms ({self.others_s * 1000:.0f} by other threads) in {where}"


def read(path: Path, since_s: float = 0.0) -> list[Piece]:
    """The pieces of a watched server that ended after `since_s` (time.time()), longest first."""
    lines = path.read_text().splitlines() if path.exists() else []
    pieces = [Piece(**json.loads(line)) for line in lines]
    return sorted((piece for piece in pieces if piece.at_s >= since_s), key=lambda piece: -piece.cost_s)


class Watch:
    def __init__(self, loop: asyncio.AbstractEventLoop, path: Path | None) -> None:
        self.loop = loop
        self.path = path
        # When each was taken, whether of the loop's own thread, and the stack.
        self.samples: deque[tuple[float, bool, tuple[str, ...]]] = deque(maxlen=1000)
        self.sampler_s = 0.0  # CPU time of the thread that takes stacks, which is not the server's
        loop.call_soon(self.start)

    def start(self) -> None:
        """On the loop's thread."""
        self.thread_id = threading.get_ident()
        self.schedstat = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        self.last = self.clocks()
        threading.Thread(target=self.sample, daemon=True, name="loop-watch").start()
        self.loop.call_later(TICK_S, self.tick)

    def clocks(self) -> tuple[float, float, float, float]:
        """(wall, CPU of this thread, CPU of the server's threads, time this thread waited for a core), in seconds."""
        delay_ns = int(os.pread(self.schedstat, 100, 0).split()[1])
        return time.perf_counter(), time.thread_time(), time.process_time() - self.sampler_s, delay_ns / 1e9

    def tick(self) -> None:
        before, self.last = self.last, self.clocks()
        wall_s, loop_s, all_s, delay_s = (now - then for now, then in zip(self.last, before))
        waited_s = max(0.0, wall_s - loop_s - delay_s - 2 * TICK_S)
        others_s = min(waited_s, max(0.0, all_s - loop_s))
        if loop_s + others_s >= NOTED_S:
            self.note(before[0], loop_s, others_s)
            self.last = self.clocks()  # writing it down is no piece of the server
        self.loop.call_later(TICK_S, self.tick)

    def note(self, since_s: float, loop_s: float, others_s: float) -> None:
        is_loops = loop_s >= others_s
        seen = Counter(stack for when, of_loop, stack in self.samples if when >= since_s and of_loop == is_loops)

        def importance(stack: tuple[str, ...]) -> tuple[bool, int]:
            """A pool's thread that waits for work comes last: it matters only if it frees objects."""
            is_idle = bool(stack) and "_worker" in stack[0]
            return not is_idle, seen[stack]

        stack = list(max(seen, key=importance)) if seen else []
        piece = Piece(round(time.time(), 4), round(loop_s + others_s, 5), round(loop_s, 5), round(others_s, 5), stack)
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(json.dumps(piece._asdict()) + "\n")
        if piece.cost_s > LIMIT_S:
            print(f"loop_watch: {piece}", file=sys.stderr, flush=True)

    def sample(self) -> None:
        """On a thread of its own: where everybody is while the loop stands still.

        After a long call that kept the interpreter lock it gets its turn just when the call returns, with the caller
        still at that line.
        """
        while not self.loop.is_closed():
            self.sampler_s = time.thread_time()
            time.sleep(SAMPLE_S)
            if time.perf_counter() - self.last[0] < STUCK_S:
                continue
            for thread_id, frame in sys._current_frames().items():
                if thread_id == threading.get_ident():
                    continue
                self.samples.append((time.perf_counter(), thread_id == self.thread_id, _stack(frame)))


def _stack(frame: FrameType) -> tuple[str, ...]:
    """Innermost first."""
    entries = reversed(traceback.extract_stack(frame, 2 * MAX_FRAMES))
    named = [(Path(entry.filename).name, entry) for entry in entries]
    return tuple(f"{name}:{entry.lineno} {entry.name}" for name, entry in named if name not in OUTER)[:MAX_FRAMES]


def main() -> None:
    make_loop = uvloop.new_event_loop
    path = os.environ.get("LOOP_WATCH")

    def watched_loop() -> asyncio.AbstractEventLoop:
        loop = make_loop()
        Watch(loop, Path(path) if path else None)
        return loop

    uvloop.new_event_loop = watched_loop  # which quire.api.server.run asks for

    from quire.api.cli import main as quire

    quire()


if __name__ == "__main__":
    main()
