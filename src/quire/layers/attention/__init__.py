"""Attention over the paged cache: the layer, and one file per way to compute it (a backend).

A backend is a module with `why_not(device, dtype, head_size, block_size, padded)`: why it cannot be used, if so; and with `paged_attention`
and `rope_and_write` as in `ops/ref`; the layout of a block is its own affair. For GPUs it says how work is cut (`work_shape`). One that
is given `fresh` rows has `fresh_attention` as well. worker/choose.py has the order in which they are tried; `--attention-backend` names one. On GPUs a backend may say `READS_WORK = False`: it goes by lengths and block
tables, not by work lists, and gets no `fresh` rows; and `RECORDABLE = False`: steps with it are not made into CUDA graphs.
"""

from quire.layers.attention import reference
from quire.layers.attention.base import Attention, CacheLayer
from quire.layers.base import StepContext

__all__ = ["Attention", "CacheLayer", "StepContext", "reference"]
