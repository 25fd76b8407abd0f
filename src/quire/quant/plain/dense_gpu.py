"""Plain tensors on a GPU: few rows are multiplied by our own kernels, at the speed of memory, many rows by cuBLAS."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from quire.ops.linear import rows_hopper, triton, triton_rows
from quire.quant.plain.dense import Dense, why_not

__all__ = ["METHOD", "DenseGpu", "why_not"]

FEW_ROWS = triton, rows_hopper, triton_rows  # the first that fits


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None) -> Tensor:
    for kernels in FEW_ROWS:
        if kernels.fits(x, weight):
            return kernels.linear(x, weight, bias, out_dtype)
    y = functional.linear(x, weight, bias)
    return y if out_dtype is None else y.to(out_dtype)


class DenseGpu(Dense):
    def apply(self, x: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None = None) -> Tensor:
        return multiply(x, self.weight, bias, out_dtype)

    def apply_silu_mul(self, x: Tensor, bias: Tensor | None, silu_mul: Callable[[Tensor], Tensor]) -> Tensor:
        for kernels in FEW_ROWS:
            if kernels.fits(x, self.weight):
                return kernels.linear_silu_mul(x, self.weight, bias)
        return super().apply_silu_mul(x, bias, silu_mul)


METHOD, EXPERTS = DenseGpu, Dense
