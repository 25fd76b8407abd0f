"""The queue of requests that have no row and no blocks yet, in the order of a policy, and fair to their owners.

Used by the scheduler. A policy is only a sort key, so a preempted request returns to the place it had. Among equal
priorities the owner comes first who had the fewest tokens in the last minute; requests of one owner keep their order.
"""

import heapq
import time
from collections import deque
from collections.abc import Callable, Iterable

from quire.core.request import Request, Status

POLICIES = {
    "fcfs": lambda request, arrival_idx: (0, arrival_idx),
    "priority": lambda request, arrival_idx: (request.priority, arrival_idx),
}

WINDOW_S = 60


class WaitingQueue:
    """A line per owner. Choosing among several takes time in proportion to the owners who wait: a server has few keys.
    The choice stands until something changes."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._uses: dict[str, TokenUse] = {}  # of owners who had tokens in the last minute, or wait
        self._lines: dict[str, Line] = {}  # of owners for whom requests wait
        self._count = 0
        self.num_tokens = 0  # that they will have to compute, as far as is known
        self._second = 0  # up to which the uses are those of the last minute
        self._next: Request | None = None  # the choice, where it is known

    def __len__(self) -> int:
        return self._count

    def push(self, request: Request) -> None:
        request.status = Status.WAITING
        self._count += 1
        request.num_queued = len(request.token_ids) - request.num_expected
        self.num_tokens += request.num_queued
        self._next = None
        line = self._lines.get(request.owner)
        if line is None:
            line = self._lines[request.owner] = Line(self._use(request.owner))
        line.push(request)

    def peek(self) -> Request | None:
        """Who is next."""
        if self._next is None and self._count:
            self._next = min(self._lines.values(), key=Line.rank).head() if len(self._lines) > 1 else self._only()
        return self._next

    def _only(self) -> Request:
        (line,) = self._lines.values()
        return line.head()

    def remove(self, request: Request, status: Status) -> None:
        """The request leaves the queue, from wherever it is, and gets `status`."""
        request.status = status
        self._count -= 1
        self.num_tokens -= request.num_queued
        self._next = None
        line = self._lines[request.owner]
        line.remove(request)
        if not line.count:
            del self._lines[request.owner]

    # -- what owners used ----------------------------------------------------------------------------------------

    def charge(self, request: Request, num_cached: int) -> None:
        """The request is admitted for the first time: what it has to compute is its owner's use of the engine."""
        num_tokens = len(request.token_ids)
        self._use(request.owner).add(num_tokens - num_cached, int(self.clock()))
        request.num_charged = num_tokens
        self._next = None

    def settle(self, requests: Iterable[Request]) -> None:
        """Counts the tokens that the requests have generated since they were last counted."""
        second = int(self.clock())
        for request in requests:
            num_new = len(request.token_ids) - request.num_charged
            if num_new > 0:
                self._use(request.owner).add(num_new, second)
                request.num_charged += num_new
        self._next = None

    def settle_now_and_then(self, running: list[Request]) -> None:
        """Called before requests are admitted: every second, if several owners wait, uses are brought up to date."""
        if len(self._lines) <= 1 or (second := int(self.clock())) == self._second:
            return
        self._second = second
        self.settle(running)
        for owner, use in list(self._uses.items()):
            use.expire(second)
            if not use.total and owner not in self._lines:
                del self._uses[owner]

    def _use(self, owner: str) -> "TokenUse":
        use = self._uses.get(owner)
        if use is None:
            use = self._uses[owner] = TokenUse()
        return use


class Line:
    """The requests of one owner: a heap; those that stopped waiting are skipped when they come to the top."""

    def __init__(self, use: "TokenUse") -> None:
        self.use = use
        self.heap: list[tuple[tuple[int, int], Request]] = []
        self.count = 0

    def push(self, request: Request) -> None:
        self.count += 1
        heapq.heappush(self.heap, (request.key, request))

    def remove(self, request: Request) -> None:
        self.count -= 1
        if self.heap[0][1] is request:
            heapq.heappop(self.heap)

    def head(self) -> Request:
        """There is one: a line without requests is not kept."""
        while self.heap[0][1].status is not Status.WAITING:
            heapq.heappop(self.heap)
        return self.heap[0][1]

    def rank(self) -> tuple[int, bool, int, int]:
        """Smaller is earlier. A preempted request has waited before, and what it used is counted already."""
        head = self.head()
        priority, arrival_idx = head.key
        return priority, head.num_preemptions == 0, self.use.total, arrival_idx


class TokenUse:
    """How many tokens an owner had computed and generated in the last minute, in slots of a second."""

    def __init__(self) -> None:
        self.total = 0
        self._slots: deque[list[int]] = deque()  # [second, tokens], the oldest first; never more than a minute of them

    def add(self, num_tokens: int, second: int) -> None:
        slots = self._slots
        if slots and slots[-1][0] == second:
            slots[-1][1] += num_tokens
        else:
            self.expire(second)
            slots.append([second, num_tokens])
        self.total += num_tokens

    def expire(self, second: int) -> None:
        slots = self._slots
        while slots and slots[0][0] <= second - WINDOW_S:
            self.total -= slots.popleft()[1]
