"""The pool of KV blocks: how many requests hold each block, which content each has, which is evicted next.

Called by `kv/manager.py` only. A block is always in exactly one state:

    free     nobody holds it; if it has content it can be found until it is evicted (least recently used first)
    held     reference count > 0: in the tables of one or more requests
    limbo    released by its last holder while a step in flight still uses it; free once that step is applied

Block 0, the null block, is never given out: tables have it where a window has moved on, and where nothing is written.
"""

from collections import OrderedDict, deque
from collections.abc import Callable

NULL_BLOCK = 0


class BlockPool:
    def __init__(self, num_blocks: int, before_forgetting: Callable[[int, int, bytes], None]) -> None:
        """`before_forgetting(block, group, content hash)` is called before a block's content is evicted."""
        self.num_blocks = num_blocks
        self.before_forgetting = before_forgetting
        self.ref_counts = [0] * num_blocks
        self.content: list[tuple[int, bytes] | None] = [None] * num_blocks  # (group, hash) a block can be found by
        self.cached: dict[tuple[int, bytes], int] = {}  # (group, hash) -> block
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))  # in the order of eviction
        self.limbo: deque[tuple[int, list[int]]] = deque()  # (step id, blocks), oldest first
        self.num_limbo = 0

    @property
    def num_free(self) -> int:
        return len(self.free)

    def take_blocks(self, count: int) -> list[int]:
        """`count` blocks, evicting content; the caller has checked `num_free`."""
        blocks = []
        for _ in range(count):
            block, _ = self.free.popitem(last=False)
            content = self.content[block]
            if content is not None:
                self.before_forgetting(block, *content)
                del self.cached[content]
                self.content[block] = None
            self.ref_counts[block] = 1
            blocks.append(block)
        return blocks

    def share(self, blocks: list[int]) -> None:
        """One more holder for each block (a prefix hit, a fork); null blocks are skipped."""
        for block in blocks:
            if block != NULL_BLOCK:
                if self.ref_counts[block] == 0:
                    del self.free[block]
                self.ref_counts[block] += 1

    def let_go(self, blocks: list[int], step_in_flight: int | None) -> None:
        """One holder less for each. Blocks are evicted in the order of `blocks`: pass the last of a request first.

        With a step in flight, blocks that become free wait in limbo until that step is applied.
        """
        freed = []
        for block in blocks:
            if block != NULL_BLOCK:
                self.ref_counts[block] -= 1
                if self.ref_counts[block] == 0:
                    freed.append(block)
        if not freed:
            return
        if step_in_flight is None:
            self._to_free(freed)
        else:
            # `find` does not return blocks in limbo: share() could not take them out of the free list.
            self.limbo.append((step_in_flight, freed))
            self.num_limbo += len(freed)

    def step_applied(self, step_id: int) -> None:
        """Blocks that waited for this step or an earlier one are free now."""
        while self.limbo and self.limbo[0][0] <= step_id:
            _, blocks = self.limbo.popleft()
            self.num_limbo -= len(blocks)
            self._to_free(blocks)

    def publish(self, block: int, group: int, content_hash: bytes) -> bool:
        """The block is full and computed: from now on it can be found. The first of equal blocks wins.

        Returns whether this one did."""
        key = group, content_hash
        if self.content[block] is not None or key in self.cached:
            return False
        self.content[block] = key
        self.cached[key] = block
        return True

    def find(self, group: int, content_hash: bytes) -> int | None:
        """A block with this content that may be shared now."""
        block = self.cached.get((group, content_hash))
        if block is None:
            return None
        is_in_limbo = self.ref_counts[block] == 0 and block not in self.free
        return None if is_in_limbo else block

    def forget_contents(self) -> None:
        """No block can be found any more, and none is copied to a tier before it is used for something else."""
        self.cached.clear()
        self.content = [None] * self.num_blocks

    def _to_free(self, blocks: list[int]) -> None:
        for block in blocks:
            self.free[block] = None
            if self.content[block] is None:
                self.free.move_to_end(block, last=False)  # no content to keep: given out before blocks with content
