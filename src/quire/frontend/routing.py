"""Which of several cores takes a request: the one that has the least to compute with it, known prefixes counted.

Asked by `cores.py`. Pure: no clock, no process, the same answer to the same question.
"""

from collections.abc import Container, Sequence
from typing import NamedTuple

# What a live request counts in tokens that are to be computed: its answer takes a part of every step.
LIVE_TOKENS = 32
# A core that knows the prefix may have so many live requests more than another; then the other one learns it, too.
# Otherwise all requests that begin alike, as those with one system prompt do, would be one core's.
MAX_AHEAD = 14
# A token that is computed for the second time costs its own request time, and all that wait behind it.
SAVED = 2


class Load(NamedTuple):
    """What is known of a core when a request comes."""

    is_ready: bool
    num_to_compute: int  # tokens of its requests that are not computed yet
    num_live: int  # requests
    num_cached: int  # of the tokens of the request that came
    num_known: int  # blocks in its prefix cache


def choose(loads: Sequence[Load]) -> int:
    """The index of a core: a ready one, if any is. Of equal ones that with fewer requests, then an emptier cache."""
    candidates = [idx for idx, load in enumerate(loads) if load.is_ready] or range(len(loads))
    live_tokens = max(LIVE_TOKENS, SAVED * max(loads[idx].num_cached for idx in candidates) / MAX_AHEAD)

    def cost(idx: int) -> tuple[float, int, int, int]:
        load = loads[idx]
        num_tokens = load.num_to_compute - SAVED * load.num_cached + live_tokens * load.num_live
        return num_tokens, load.num_live, load.num_known, idx

    return min(candidates, key=cost)


def num_cached(
    prefix: Sequence[int], known: Container[int], expected: Container[int], block_size: int, hit_unit: int
) -> int:
    """How many tokens of a prompt a core has: `prefix` are the digests of its blocks.

    `known`: those that the core told of; `expected`: those that it will have when it has computed what it was sent."""
    count = 0
    for digest in prefix:
        if digest not in known and digest not in expected:
            break
        count += 1
    return count * block_size // hit_unit * hit_unit if count else 0
