"""Paged attention on the CPU with the compiled kernel; twin: `ops/attention/reference.py`.

Called by `layers/attention`, which asks `supported()` first and uses the same kernels for a cache throughout: inside a
block the bytes have an order of their own (`ops/cpu/src/kv_layout.h`), which only `ops/elementwise/cpu.py` writes and
only this module reads. Blocks need not be adjacent in memory. Knows no requests or models.
"""

import ctypes
import functools
from types import SimpleNamespace

import torch
from torch import Tensor

from quire.ops.attention.reference import AttentionTables
from quire.ops.cpu.tape import Rows, compiled
from quire.ops.elementwise.cpu import CODES

_PTR, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


@functools.cache
def _kernels(cache_dtype: torch.dtype) -> SimpleNamespace:
    arguments = [ctypes.c_int, *[_PTR] * 8, Rows, *[_INT] * 10, _FLOAT, _FLOAT]
    return compiled("attention", f"QUIRE_CODES={CODES.get(cache_dtype, 0)}", paged_attention=arguments)


def supported(dtype: torch.dtype, cache_dtype: torch.dtype, head_size: int, block_size: int) -> bool:
    """Whether the compiled kernel exists on this machine and takes a cache of this shape."""
    shape_fits = head_size % 16 == 0 and head_size <= 256 and block_size % 16 == 0
    types_fit = dtype in (torch.float32, torch.bfloat16) and cache_dtype in (dtype, *CODES)
    return types_fit and shape_fits and _kernels(cache_dtype).available


def paged_attention(
    q_THD: Tensor,
    cache: Tensor,
    tables: AttentionTables,
    *,
    scale: float,
    window: int = 0,
    sinks_H: Tensor | None = None,
    softcap: float = 0.0,
    scales: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """As the twin. The heads of a token are contiguous in q and in out; tokens may have any stride."""
    if out is None:
        out = torch.empty(q_THD.shape, dtype=q_THD.dtype)
    _, num_heads, head_size = q_THD.shape
    _, _, block_size, num_kv_heads, _ = cache.shape
    sinks_H = None if sinks_H is None else sinks_H.float()
    _kernels(cache.dtype).paged_attention(
        q_THD.dtype == torch.bfloat16,
        q_THD.data_ptr(),
        out.data_ptr(),
        cache.data_ptr(),
        None if scales is None else scales.data_ptr(),
        tables.query_starts.data_ptr(),
        tables.context_lens.data_ptr(),
        tables.block_table.data_ptr(),
        None if sinks_H is None else sinks_H.data_ptr(),
        tables.context_lens.shape[0],
        num_heads,
        num_kv_heads,
        head_size,
        block_size,
        cache.stride(0),
        0 if scales is None else scales.stride(0),
        q_THD.stride(0),
        out.stride(0),
        tables.block_table.stride(0),
        window,
        scale,
        softcap,
    )
    return out
