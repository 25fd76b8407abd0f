"""Attention over the paged cache: the layer, and one file per way to compute it (a backend).

A backend's file has `BACKEND`, a class as in `base.py` with `rope_and_write` and `paged_attention` as in the reference
modules of ops/elementwise and ops/attention (how a block is laid out is up to the backend), and `why_not(device, dtype,
head_size, block_size, cache_dtype)`: why it cannot be used, or None. `worker/choose.py` has the order in which backends
are tried; `--attention-backend` names one.
"""

from quire.layers.attention._layer import Attention, CacheLayer
from quire.layers.base import StepContext

__all__ = ["Attention", "CacheLayer", "StepContext"]
