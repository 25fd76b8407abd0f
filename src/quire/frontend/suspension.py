"""Whether the requests of a core run: operators put it to sleep, and pause it.

Made by `supervisor.py`, for all cores it will have: one that dies asleep is followed by one that is asleep. Knows
streams and questions to a core, not processes.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Literal

from quire.errors import EngineError, OverloadedError
from quire.frontend.stream import Stream
from quire.messages import Hold, Question, Sleep, WakeUp

DRAIN_TICK_S = 0.02

Mode = Literal["abort", "wait", "keep"]  # what becomes of requests that run when it sleeps or pauses
State = Literal["awake", "falling asleep", "asleep", "waking up"]


class Suspension:
    def __init__(
        self,
        live: dict[str, Stream],
        ask: Callable[[Question], Awaitable[str]],
        on_release: Callable[[], None],
        on_move: Callable[[], None],
    ) -> None:
        """`ask`: gives the problem of the core's answer. `on_release`: requests that were kept may run. `on_move`: the
        core fell asleep or woke up, or failed to."""
        # Asleep, the core has given the device's memory back, and requests wait in the frontend.
        self.state: State = "awake"
        self.is_loading = False  # the core moves much memory: that may take as long as its start
        self.is_paused = False  # requests that the core has not seen wait
        self.is_held = False  # the others, too
        self._live = live
        self._ask = ask
        self._on_release = on_release
        self._on_move = on_move

    def holds(self, stream: Stream) -> bool:
        """Whether its request must not be sent to the core now."""
        return self.state != "awake" or self.is_held or (self.is_paused and stream.epoch < 0)

    # -- sleep ---------------------------------------------------------------------------------------------------

    async def sleep(self, question: Sleep, mode: Mode) -> None:
        """Has the core give the device's memory back; does nothing if it has already.

        `mode`: what becomes of live requests: they are aborted, waited for, or kept, and go on when it wakes up.
        """
        if self._is_settled("asleep"):
            return
        self.state = "falling asleep"
        try:
            if mode == "abort":
                for stream in list(self._live.values()):
                    stream.abort()
            while mode == "wait" and self._live:
                await asyncio.sleep(DRAIN_TICK_S)
        except BaseException:  # whoever asked gave up
            self.state = "awake"
            raise
        await asyncio.shield(asyncio.create_task(self._move(question, "asleep", "awake")))

    async def wake_up(self) -> None:
        """Returns when the core takes requests again; those that were kept go on. Does nothing if it is awake."""
        if self._is_settled("awake"):
            return
        self.state = "waking up"
        await asyncio.shield(asyncio.create_task(self._move(WakeUp(), "awake", "asleep")))

    def _is_settled(self, wanted: str) -> bool:
        """OverloadedError: it is on the way from one state to the other."""
        if self.state not in ("asleep", "awake"):
            raise OverloadedError(f"the engine is {self.state}: try again in a moment")
        return self.state == wanted

    async def _move(self, question: Sleep | WakeUp, wanted: State, before: State) -> None:
        """Not to be interrupted: the core does it in any case. EngineError: it died, and the next one is as before."""
        self.is_loading = True
        try:
            problem = await self._ask(question)
            self.state = before if problem else wanted
        finally:
            self.is_loading = False
        self._on_move()
        self._on_release()
        if problem:
            raise EngineError(f"the engine is {before}: {problem}")

    # -- pause ---------------------------------------------------------------------------------------------------

    async def pause(self, mode: Mode) -> None:
        """Requests that come from now on wait for `resume`. Those that the core has are aborted, waited for, or kept
        as they are until then."""
        self.is_paused = True
        await self._hold(mode == "keep")
        if mode == "abort":
            for stream in self._running():
                stream.abort()
        while mode == "wait" and self.is_paused and self._running():
            await asyncio.sleep(DRAIN_TICK_S)

    async def resume(self) -> None:
        self.is_paused = False
        await self._hold(False)

    async def _hold(self, is_held: bool) -> None:
        if self.is_held != is_held:
            self.is_held = is_held
            await self._ask(Hold(is_held))
        self._on_release()

    def _running(self) -> list[Stream]:
        """Those that were sent to a core."""
        return [stream for stream in self._live.values() if stream.epoch >= 0]
