"""What one key may ask for in a minute: requests and tokens, counted over the last 60 seconds.

`keys.py` makes the limits of a key, the guard an `Allowance` for each of its calls, and `generation.py` reserves tokens
before it starts requests. Must not know keys or HTTP.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from quire.errors import RateLimitedError

WINDOW_S = 60.0
SLOT_S = 0.05  # what is taken within this time is kept as one: there are never more than some 1,200 slots


@dataclass(slots=True)
class Slot:
    """What was taken at about the same time."""

    first_s: float
    last_s: float
    amount: int
    is_over: bool = False


class Window:
    """How much was taken in the last minute, to the piece. A slot ends a minute after its last taking."""

    def __init__(self) -> None:
        self.slots: deque[Slot] = deque()
        self.total = 0

    def take(self, amount: int, now_s: float) -> Slot:
        if not self.slots or now_s - self.slots[-1].first_s >= SLOT_S:
            self.slots.append(Slot(now_s, now_s, 0))
        slot = self.slots[-1]
        slot.last_s = now_s
        slot.amount += amount
        self.total += amount
        return slot

    def give_back(self, slot: Slot, amount: int) -> None:
        if not slot.is_over:
            slot.amount -= amount
            self.total -= amount

    def wait_s(self, amount: int, limit: int, now_s: float) -> float:
        """Seconds until so much more can be taken, which is at most `limit`; 0: now."""
        while self.slots and now_s - self.slots[0].last_s >= WINDOW_S:
            slot = self.slots.popleft()
            slot.is_over = True
            self.total -= slot.amount
        excess = self.total + amount - limit
        if excess <= 0:
            return 0.0
        for slot in self.slots:
            excess -= slot.amount
            if excess <= 0:
                return slot.last_s + WINDOW_S - now_s
        return WINDOW_S


class Limits:
    """Of one key. None: there is no such limit."""

    def __init__(self, rpm: int | None, tpm: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.rpm = rpm
        self.tpm = tpm
        self.clock = clock
        self.requests = Window()
        self.tokens = Window()

    def start_call(self) -> "Allowance":
        """Counts a call; RateLimitedError: it is one too many."""
        if self.rpm is not None:
            now_s = self.clock()
            if wait_s := self.requests.wait_s(1, self.rpm, now_s):
                text = f"this key may make {self.rpm:,} requests a minute: try again in {wait_s:.0f} s"
                raise RateLimitedError(text, wait_s)
            self.requests.take(1, now_s)
        return Allowance(self)


class Allowance:
    """What one call takes of its key's tokens."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.taken: list[tuple[Slot, int]] = []
        self.num_reserved = 0

    def reserve(self, num_tokens: int) -> None:
        """Called before a request is started that may compute so many; RateLimitedError: they are too many now.

        A call never takes more than all that its key has: else one larger than that could never run.
        """
        limit = self.limits.tpm
        if limit is None:
            return
        now_s = self.limits.clock()
        tokens = self.limits.tokens
        amount = max(0, min(num_tokens, limit - self.num_reserved))
        if wait_s := tokens.wait_s(amount, limit, now_s):
            left = max(0, limit - tokens.total)
            raise RateLimitedError(
                f"this key may use {limit:,} tokens a minute, {left:,} are left and this may take {amount:,}: "
                f"try again in {wait_s:.0f} s, or lower max_tokens",
                wait_s,
            )
        self.taken.append((tokens.take(amount, now_s), amount))
        self.num_reserved += amount

    def settle(self, num_used: int) -> None:
        """The call is over, and computed so many tokens: the others are its key's again."""
        num_unused = self.num_reserved - num_used
        for slot, amount in reversed(self.taken):
            if num_unused <= 0:
                break
            returned = min(amount, num_unused)
            self.limits.tokens.give_back(slot, returned)
            num_unused -= returned
        self.taken.clear()
        self.num_reserved = 0
