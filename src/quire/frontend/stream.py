"""A live request as its reader sees it: filled by the supervisor, read by one task."""

import asyncio
import copy
from collections.abc import Callable, Sequence

from quire.frontend.requests import ChoiceUpdate, RequestState


class Stream:
    """Iterating gives what was added since the last read, one list per wake-up.

    A reader that keeps up gets one list per step, a slow one gets several steps merged: what waits for it is never
    longer than the request. Raises DeadlineError, PoisonError or EngineError where the request could not be finished.
    Whoever stops reading early calls `abort()`, which frees the request in the core within one step.
    """

    def __init__(self, request: RequestState, on_abort: Callable[[str], None], prefix: Sequence[int] = ()) -> None:
        """`prefix`: digests of its prompt's blocks, where cores are chosen by them."""
        self.request = request
        self.prefix = prefix  # until they are computed
        self.epoch = -1  # of the core it was last sent to
        self.error: Exception | None = None
        self._on_abort = on_abort
        self._changed = False
        self._only_end = False  # its reader wants to be woken once
        self._waits = request.params.stream_interval is not None  # its reader wants several tokens at once
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def __aiter__(self) -> "Stream":
        return self

    async def __anext__(self) -> list[ChoiceUpdate]:
        while True:
            self._raise_error()
            if self._changed:
                self._changed = False
                if updates := self.request.updates():
                    return updates
            if self.request.finished:
                raise StopAsyncIteration
            await self._woken()

    async def wait(self) -> RequestState:
        """The request when it is finished; cheaper than reading it step by step."""
        self._only_end = True
        while not self.request.finished:
            self._raise_error()
            await self._woken()
        self._raise_error()
        return self.request

    def _woken(self) -> asyncio.Future[None]:
        self._waiter = asyncio.get_running_loop().create_future()
        return self._waiter

    def _raise_error(self) -> None:
        if self.error is not None:
            # A copy: raising adds a traceback, which refers to this stream, so our own error would be part of a cycle.
            raise copy.copy(self.error)

    def abort(self) -> None:
        """Ends the request with what it has; harmless when it is over."""
        if not self.request.finished and self.error is None:
            self._on_abort(self.request.request_id)
            self.wake()

    def expire_at(self, when: float, callback: Callable[["Stream"], None]) -> None:
        """`when`: by the loop's clock."""
        self._timer = asyncio.get_running_loop().call_at(when, callback, self)

    def wake(self) -> None:
        if self._only_end and self.error is None and not self.request.finished:
            return
        if self._waits and self.error is None and not any(choice.is_due for choice in self.request.choices):
            return
        self._changed = True
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
        if self._timer is not None and self.request.finished:
            self._timer.cancel()

    def fail(self, error: Exception) -> None:
        self.error = error
        if self._timer is not None:
            self._timer.cancel()
        self.wake()
