"""Copies of KV blocks in plain torch: the oracle of `ops/blocks/triton.py`.

Knows caches and block ids; not why blocks are copied.

Shape letters: P pairs.
"""

from torch import Tensor


def copy_blocks(source_cache: Tensor, target_cache: Tensor, pairs_P2: Tensor) -> None:
    """For each (source, target) of `pairs_P2`, copies that block of the source cache to that block of the target cache.

    Pairs with a negative number are padding. Both caches are [blocks, …] of one dtype and block shape. They may be the
    same cache: then no block may be both source and target.
    """
    source_P, target_P = pairs_P2[(pairs_P2 >= 0).all(1)].long().unbind(1)
    target_cache[target_P] = source_cache[source_P]
