"""Long work on an event loop in short pieces: others get their turn in between."""

import asyncio
import time

MAX_PIECE_S = 0.002


class LoopShare:
    """`await share.pause()` between the parts of a long piece of work: the loop turns whenever they took long enough."""

    def __init__(self) -> None:
        self._started_s = time.perf_counter()

    async def pause(self) -> None:
        if time.perf_counter() - self._started_s > MAX_PIECE_S:
            await asyncio.sleep(0)
            self._started_s = time.perf_counter()
