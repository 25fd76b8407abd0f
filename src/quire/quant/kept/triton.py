"""Quantized weights on a GPU, packed in words: few rows are multiplied by our own kernel, many by the library's.

The library multiplies float8 with float8 and int8 with int8; for weights of other kinds, and where activations are not
rounded, the weight is unpacked to 16 bits for the time of one product.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from quire.errors import UnsupportedModelError
from quire.ops.packed_linear import many_rows, words
from quire.ops.packed_linear import triton as kernels
from quire.ops.packed_linear.forms import Form, weight_only
from quire.quant.base import Part, Quantized, Reader, runs_of
from quire.quant.plain.dense_gpu import why_not

__all__ = ["METHOD", "Words", "why_not"]


class Words(Quantized):
    def __init__(self, reader: Reader, parts: Sequence[Part], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(reader, parts, dtype, device)
        self.packed: dict[int, words.WordWeight] = {}  # by index of the part, until all are loaded
        self.pieces: list[words.WordWeight] = []  # the parts in order, neighbours of the same layout joined

    def put_form(self, part_idx: int, form: Form) -> None:
        # In float32, which is for exactness checks, activations are not rounded.
        packed = words.pack(form if self.dtype != torch.float32 else weight_only(form))
        if packed is None:
            n, k = form.codes_NK.shape
            raise UnsupportedModelError(
                f"{self.parts[part_idx].path} has {k} inputs in groups that the kernels of GPUs cannot compute"
            )
        self.packed[part_idx] = packed
        if len(self.packed) == len(self.parts):
            self.pieces = [words.concat(run) for run in runs_of(self.packed, words.joinable)]
            self.packed = {}

    def numbers(self) -> Tensor:
        return torch.cat([piece.numbers() for piece in self.pieces]).to(self.dtype)

    def apply(self, x: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None = None) -> Tensor:
        if len(self.pieces) == 1:
            return _multiply(x, self.pieces[0], bias, out_dtype)
        y = torch.cat([_multiply(x, piece, None, out_dtype) for piece in self.pieces], -1)
        return y if bias is None else y + bias

    def apply_silu_mul(self, x: Tensor, bias: Tensor | None, silu_mul: Callable[[Tensor], Tensor]) -> Tensor:
        if len(self.pieces) == 1 and kernels.few_rows(x, self.pieces[0]):
            inputs, options = _rounded(x, self.pieces[0])
            return kernels.linear_silu_mul(inputs, self.pieces[0], bias, **options)
        return super().apply_silu_mul(x, bias, silu_mul)

    def memory(self) -> dict[int, int]:
        tensors = [tensor for piece in self.pieces for tensor in piece.tensors()]
        return {tensor.data_ptr(): tensor.nbytes for tensor in tensors}


def _multiply(x: Tensor, w: words.WordWeight, bias: Tensor | None, out_dtype: torch.dtype | None) -> Tensor:
    multiply = kernels.linear if kernels.few_rows(x, w) else many_rows.linear
    inputs, options = _rounded(x, w)
    return multiply(inputs, w, bias, out_dtype, **options)


def _rounded(x: Tensor, w: words.WordWeight) -> tuple[Tensor, dict[str, Any]]:
    """The inputs as the weight wants them, and what else its product needs to know of them."""
    if w.rounds is None:
        return x, {}
    codes, scales = many_rows.round_rows(x, w.rounds, w.input_scale)
    return codes, {"scales": scales, "dtype": x.dtype}


METHOD = Words
