"""The queue of requests that have no row and no blocks yet, in the order of a policy.

Used by the scheduler. A policy is only a sort key, so a preempted request returns to the place it had.
"""

import heapq

from quire.core.request import Request, Status

POLICIES = {
    "fcfs": lambda request, arrival_idx: (0, arrival_idx),
    "priority": lambda request, arrival_idx: (request.priority, arrival_idx),
}


class WaitingQueue:
    """A heap; requests that stopped waiting are skipped when they come to the top."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], Request]] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def push(self, request: Request) -> None:
        request.status = Status.WAITING
        self._count += 1
        heapq.heappush(self._heap, (request.key, request))

    def peek(self) -> Request | None:
        while self._heap and self._heap[0][1].status is not Status.WAITING:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def remove(self, request: Request, status: Status) -> None:
        """The request leaves the queue, from wherever it is, and gets `status`."""
        request.status = status
        self._count -= 1
        if self._heap[0][1] is request:
            heapq.heappop(self._heap)
