"""Plain tensors on a GPU: few rows are multiplied by our own kernels, at the speed of memory, many rows by cuBLAS."""

from collections.abc import Callable

import torch
from torch import Tensor

from quire.ops.linear.triton import few_rows, linear, linear_silu_mul
from quire.quant.plain.dense import Dense, why_not

__all__ = ["METHOD", "DenseGpu", "why_not"]


class DenseGpu(Dense):
    def apply(self, x: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None = None) -> Tensor:
        if few_rows(x, self.weight):
            return linear(x, self.weight, bias, out_dtype)
        return super().apply(x, bias, out_dtype)

    def apply_silu_mul(self, x: Tensor, bias: Tensor | None, silu_mul: Callable[[Tensor], Tensor]) -> Tensor:
        if few_rows(x, self.weight):
            return linear_silu_mul(x, self.weight, bias)
        return super().apply_silu_mul(x, bias, silu_mul)


METHOD = DenseGpu
