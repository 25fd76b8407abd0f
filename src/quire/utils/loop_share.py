"""Cuts long work on an event loop into short pieces, so that other tasks run in between."""

import asyncio
import time

MAX_PIECE_S = 0.002


class LoopShare:
    """`await share.pause()` between the parts of long work lets other tasks run once the parts took `MAX_PIECE_S`."""

    def __init__(self) -> None:
        self._started_s = time.perf_counter()

    async def pause(self) -> None:
        if time.perf_counter() - self._started_s > MAX_PIECE_S:
            await asyncio.sleep(0)
            self._started_s = time.perf_counter()
