"""Paged attention on the CPU with the compiled kernel: same functions, same meaning as `ops/ref/attention.py`.

Called by `layers/attention`, which asks `supported()` first and keeps one choice per cache: inside a block the bytes
lie in the kernel's own order (`src/kv_layout.h`), so a cache written here is read here. Blocks may lie apart. Knows no
requests or models.
"""

import ctypes
import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from quire.ops.cpu.build import load
from quire.ops.cpu.tape import Rows, bind
from quire.ops.ref.attention import AttentionTables

_PTR, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class _Kernels(NamedTuple):
    write_kv: Callable[..., None]
    paged_attention: Callable[..., None]


@functools.cache
def _kernels() -> _Kernels | None:
    library = load("attention")
    if library is None:
        return None
    return _Kernels(
        bind(library, "quire_write_kv", [ctypes.c_int, *[_PTR] * 4, Rows, *[_INT] * 6]),
        bind(library, "quire_paged_attention", [ctypes.c_int, *[_PTR] * 7, Rows, *[_INT] * 9, _FLOAT, _FLOAT]),
    )


def supported(dtype: torch.dtype, head_size: int, block_size: int) -> bool:
    """Whether the compiled kernel exists on this machine and takes a cache of this shape."""
    shape_fits = head_size % 16 == 0 and head_size <= 256 and block_size % 16 == 0
    return dtype in (torch.float32, torch.bfloat16) and shape_fits and _kernels() is not None


def write_kv(cache: Tensor, k_TKD: Tensor, v_TKD: Tensor, slots_T: Tensor) -> None:
    """Store keys and values at `slots_T` (block id * block size + offset); a negative slot is padding."""
    num_tokens, num_kv_heads, head_size = k_TKD.shape
    _kernels().write_kv(
        cache.dtype == torch.bfloat16, cache.data_ptr(), k_TKD.data_ptr(), v_TKD.data_ptr(), slots_T.data_ptr(),
        num_tokens, num_kv_heads, head_size, cache.shape[2], cache.stride(0), k_TKD.stride(0), v_TKD.stride(0),
    )  # fmt: skip


def paged_attention(
    q_THD: Tensor,
    cache: Tensor,
    tables: AttentionTables,
    *,
    scale: float,
    window: int = 0,
    sinks_H: Tensor | None = None,
    softcap: float = 0.0,
    out: Tensor | None = None,
) -> Tensor:
    """As the twin. q and out are rows of contiguous heads, maybe strided along T."""
    if out is None:
        out = torch.empty(q_THD.shape, dtype=q_THD.dtype)
    _, num_heads, head_size = q_THD.shape
    _, _, block_size, num_kv_heads, _ = cache.shape
    sinks_H = None if sinks_H is None else sinks_H.float()
    _kernels().paged_attention(
        cache.dtype == torch.bfloat16, q_THD.data_ptr(), out.data_ptr(), cache.data_ptr(),
        tables.query_starts.data_ptr(), tables.context_lens.data_ptr(), tables.block_table.data_ptr(),
        None if sinks_H is None else sinks_H.data_ptr(), tables.context_lens.shape[0],
        num_heads, num_kv_heads, head_size, block_size, cache.stride(0), q_THD.stride(0), out.stride(0),
        tables.block_table.stride(0), window, scale, softcap,
    )  # fmt: skip
    return out
