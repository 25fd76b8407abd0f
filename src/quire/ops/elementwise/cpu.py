"""Fused elementwise kernels on the CPU; twins: `ops/elementwise/reference.py`.

Called by `layers`, which asks `supported()` first. Takes float32 and bfloat16, rows contiguous inside; knows nothing of
models. `rope_and_write` writes the cache of `ops/attention/cpu.py`, whose block layout is not the twin's.
"""

import ctypes
import functools
from types import SimpleNamespace

import torch
from torch import Tensor

from quire.ops.cpu.tape import Rows, compiled

_PTR, _INT = ctypes.c_void_p, ctypes.c_int64
CODES = {torch.int8: 1, torch.float8_e4m3fn: 2}  # what a cache may hold, as the kernels call it


@functools.cache
def _kernels() -> SimpleNamespace:
    return compiled(
        "elementwise",
        rms_norm=[ctypes.c_int, *[_PTR] * 3, _INT, *[_PTR] * 2, Rows, _INT, ctypes.c_float],
        add=[ctypes.c_int, *[_PTR] * 3, Rows, _INT],
        silu_mul=[ctypes.c_int, _PTR, _PTR, Rows, _INT],
        rope_and_write=[*[ctypes.c_int] * 2, *[_PTR] * 8, Rows, *[_INT] * 11, *[_PTR] * 3, *[ctypes.c_float] * 3],
        embed=[_PTR, _PTR, _PTR, Rows, *[_INT] * 3],
    )


def why_not(device: torch.device, dtype: torch.dtype) -> str | None:
    return None if supported(dtype) else f"nothing is compiled for {dtype} on this machine"


def supported(dtype: torch.dtype) -> bool:
    """Whether the compiled kernels exist on this machine and take this dtype."""
    return dtype in (torch.float32, torch.bfloat16) and _kernels().available


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float, residual_TD: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """As the twin."""
    rows, width = x_TD.shape
    normed = torch.empty_like(x_TD, memory_format=torch.contiguous_format)
    total = x_TD if residual_TD is None else torch.empty_like(normed)
    _kernels().rms_norm(
        x_TD.dtype == torch.bfloat16,
        normed.data_ptr(),
        total.data_ptr(),
        x_TD.data_ptr(),
        x_TD.stride(0),
        None if residual_TD is None else residual_TD.data_ptr(),
        weight_D.data_ptr(),
        rows,
        width,
        eps,
    )
    return normed, total


def embedding(token_ids_T: Tensor, weight_VD: Tensor, first: int | None = None) -> Tensor:
    """As the twin, of ids that are int32."""
    num_rows, width = weight_VD.shape
    out = weight_VD.new_empty(token_ids_T.shape[0], width)
    pointers = out.data_ptr(), weight_VD.data_ptr(), token_ids_T.data_ptr()
    _kernels().embed(*pointers, token_ids_T.shape[0], width * weight_VD.itemsize, first or 0, num_rows)
    return out


def add(x_TD: Tensor, y_TD: Tensor) -> Tensor:
    x_TD, y_TD = x_TD.contiguous(), y_TD.contiguous()
    out = torch.empty_like(x_TD)
    pointers = out.data_ptr(), x_TD.data_ptr(), y_TD.data_ptr()
    _kernels().add(x_TD.dtype == torch.bfloat16, *pointers, *x_TD.shape)
    return out


def silu_mul(x_T2F: Tensor) -> Tensor:
    """silu(gate) * up, where a row is all of gate and then all of up."""
    rows, width = x_T2F.shape[0], x_T2F.shape[1] // 2
    out = x_T2F.new_empty(rows, width)
    _kernels().silu_mul(x_T2F.dtype == torch.bfloat16, out.data_ptr(), x_T2F.data_ptr(), rows, width)
    return out


def rope_and_write(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    cos_sin: Tensor,
    positions_T: Tensor,
    cache: Tensor,
    slots_T: Tensor,
    interleaved: bool = False,
    q_norm_D: Tensor | None = None,
    k_norm_D: Tensor | None = None,
    eps: float = 0.0,
    scales: Tensor | None = None,
    fixed_scales: tuple[float, float] | None = None,
    key_center_KD: Tensor | None = None,
) -> None:
    """As the twin, in one pass, but k and v themselves are not rounded to codes: nobody reads them any more.

    Tokens with a negative slot are padding: they are rotated, but not written.
    """
    num_tokens, num_heads, head_size = q_THD.shape
    _kernels().rope_and_write(
        q_THD.dtype == torch.bfloat16,
        CODES.get(cache.dtype, 0),
        q_THD.data_ptr(),
        k_TKD.data_ptr(),
        v_TKD.data_ptr(),
        cos_sin.data_ptr(),
        positions_T.data_ptr(),
        slots_T.data_ptr(),
        cache.data_ptr(),
        None if scales is None else scales.data_ptr(),
        num_tokens,
        num_heads,
        k_TKD.shape[1],
        head_size,
        cos_sin.shape[1],
        q_THD.stride(0),
        k_TKD.stride(0),
        v_TKD.stride(0),
        cache.shape[2],
        cache.stride(0),
        0 if scales is None else scales.stride(0),
        interleaved,
        None if q_norm_D is None else q_norm_D.data_ptr(),
        None if k_norm_D is None else k_norm_D.data_ptr(),
        None if key_center_KD is None else key_center_KD.data_ptr(),
        eps,
        *(fixed_scales or (0.0, 0.0)),
    )
