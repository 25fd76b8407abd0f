"""Attention over the paged cache: the layer, and one file per way to compute it (a backend).

A backend is a module with `supports(dtype, head_size, block_size)`, `paged_attention` and `rope_and_write`, all as in `ops/ref`; the
layout of a block is its own affair. For GPUs it says how work is cut (`work_shape`). One that is given `fresh` rows has `fresh_attention` as well. Backends are tried in the order of
PREFERRED for the device; `--attention-backend` names one. On GPUs a backend may say `READS_WORK = False`: it goes by lengths and block
tables, not by work lists, and gets no `fresh` rows; and `RECORDABLE = False`: steps with it are not made into CUDA graphs.
"""

from quire.layers.attention.base import Attention, CacheLayer, StepContext

PREFERRED = {"cpu": ("native", "reference"), "cuda": ("triton",)}
# Others' libraries, for GPUs: only where they are named.
ON_REQUEST = ("flash_attn", "flashinfer")

__all__ = ["ON_REQUEST", "PREFERRED", "Attention", "CacheLayer", "StepContext"]
