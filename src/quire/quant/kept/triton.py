"""Quantized weights on a GPU, packed in words: our own kernels multiply one row, and some hundred in tiles.

More rows are the library's: it multiplies float8 with float8 and int8 with int8; for weights of other kinds, and where
activations are not rounded, the weight is unpacked to 16 bits for the time of one product. Experts stay packed, too.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor

from quire.errors import UnsupportedModelError
from quire.ops.elementwise.triton import fits_rounded_rms_norm
from quire.ops.linear import rows_hopper
from quire.ops.packed_linear import cuts, many_rows, rows, tiles, words
from quire.ops.packed_linear import triton as kernels
from quire.ops.packed_linear.forms import Blocks, Form, Plain, weight_only
from quire.quant._select import GPU_VALUES_AT_ONCE
from quire.quant.base import Part, Quantized, Reader, runs_of, say_once
from quire.quant.plain import dense_gpu as dense
from quire.quant.plain.dense_gpu import why_not

__all__ = ["EXPERTS", "METHOD", "Words", "why_not"]


Piece = words.WordWeight | Tensor  # a tensor: weights that the checkpoint leaves plain


class Words(Quantized):
    keeps = get_args(Form)

    def __init__(self, reader: Reader, parts: Sequence[Part], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(reader, parts, dtype, device)
        self.packed: dict[int, Piece] = {}  # by index of the part, until all are loaded
        self.pieces: list[Piece] = []  # the parts in order, neighbours of the same layout joined

    def put_form(self, part_idx: int, form: Form) -> None:
        packed = self._pack(form)
        if packed is None:
            k = self.parts[part_idx].shape[-1]
            raise UnsupportedModelError(
                f"{self.parts[part_idx].path} has {k} inputs in groups that the kernels of GPUs cannot compute"
            )
        self.packed[part_idx] = packed
        if len(self.packed) == len(self.parts):
            self.pieces = [_concat(run) for run in runs_of(self.packed, _joinable)]
            self.packed = {}

    def _pack(self, form: Form) -> Piece | None:
        if isinstance(form, Blocks):
            return self._pack_by_outputs(form) or self._pack(form.decoded(self.device))
        if isinstance(form, Plain):
            return form.values_NK.to(self.device, self.dtype)
        # In float32, which is for exactness checks, activations are not rounded.
        return words.pack(weight_only(form) if self.dtype == torch.float32 else form)

    def _pack_by_outputs(self, form: Blocks) -> words.WordWeight | None:
        """Some at a time: on its way, a weight takes several times the memory of what stays. None: not in words."""
        pieces = (self._pack(part.decoded(self.device)) for part in form.parts(GPU_VALUES_AT_ONCE))
        parts = (piece if isinstance(piece, words.WordWeight) else None for piece in pieces)
        return words.stacked(parts, form.shape[0])

    def numbers(self) -> Tensor:
        numbers = [piece if isinstance(piece, Tensor) else piece.numbers() for piece in self.pieces]
        return torch.cat([values.to(self.dtype) for values in numbers])

    def apply(self, x: Tensor | rows.Rounded, bias: Tensor | None, out_dtype: torch.dtype | None = None) -> Tensor:
        if len(self.pieces) == 1:
            return _multiply(x, self.pieces[0], bias, out_dtype)
        y = torch.cat([_multiply(x, piece, None, out_dtype) for piece in self.pieces], -1)
        return y if bias is None else y + bias

    def apply_silu_mul(
        self, x: Tensor | rows.Rounded, bias: Tensor | None, silu_mul: Callable[[Tensor], Tensor]
    ) -> Tensor:
        piece = self.pieces[0] if len(self.pieces) == 1 else None
        if isinstance(piece, words.WordWeight):
            x = _rounded(x, piece)
            given, options = _inputs(x)
            if fits_few_rows(given, piece, is_gated=True):
                return rows_hopper.linear_silu_mul(given, piece.codes, bias, **float8_options(piece, **options))
            if kernels.fits(given, piece):
                return kernels.linear_silu_mul(given, piece, bias, **options)
        return silu_mul(self.apply(x, bias))

    def silu_mul(self, plain: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Any]:
        w = self._rounding()
        return plain if w is None else partial(rows.rounded_silu_mul, w)

    def rms_norm(self, plain: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Any, Tensor]]:
        w = self._rounding()
        return plain if w is None or not fits_rounded_rms_norm(w.k) else partial(rows.rounded_rms_norm, w)

    def _rounding(self) -> words.WordWeight | None:
        """The weight, if it is the only one, and wants rounded inputs."""
        piece = self.pieces[0] if len(self.pieces) == 1 else None
        return piece if isinstance(piece, words.WordWeight) and piece.rounds is not None else None

    def tensors(self) -> list[Tensor]:
        return [held for piece in self.pieces for held in ([piece] if isinstance(piece, Tensor) else piece.tensors())]


def _joinable(first: Piece, second: Piece) -> bool:
    if isinstance(first, Tensor) or isinstance(second, Tensor):
        return isinstance(first, Tensor) and isinstance(second, Tensor)
    return words.joinable(first, second)


def _concat(run: list[Piece]) -> Piece:
    plain = [piece for piece in run if isinstance(piece, Tensor)]
    packed = [piece for piece in run if isinstance(piece, words.WordWeight)]
    return words.concat(packed) if packed else torch.cat(plain)


def _multiply(x: Tensor | rows.Rounded, w: Piece, bias: Tensor | None, out_dtype: torch.dtype | None) -> Tensor:
    if isinstance(w, Tensor):
        if isinstance(x, rows.Rounded):
            raise TypeError("plain weights want inputs as they are")
        return dense.multiply(x, w, bias, out_dtype)
    given, options = _inputs(_rounded(x, w))
    if fits_few_rows(given, w):
        return rows_hopper.linear(given, w.codes, bias, out_dtype, **float8_options(w, **options))
    if kernels.fits(given, w):
        return kernels.linear(given, w, bias, out_dtype, **options)
    multiply = tiles.linear if cuts.fits(given, w) else many_rows.linear
    return multiply(given, w, bias, out_dtype, **options)


def _rounded(x: Tensor | rows.Rounded, w: words.WordWeight) -> Tensor | rows.Rounded:
    """As the weight wants them, unless they are so already."""
    if w.rounds is None or isinstance(x, rows.Rounded):
        return x
    return rows.Rounded(*rows.round_rows(x, w.rounds, w.input_scale), x.dtype)


def _inputs(x: Tensor | rows.Rounded) -> tuple[Tensor, dict[str, Any]]:
    """What kernels multiply, and what else they want to know of it if it is rounded."""
    return (x.codes, {"scales": x.scales, "dtype": x.dtype}) if isinstance(x, rows.Rounded) else (x, {})


def fits_few_rows(x: Tensor, w: words.WordWeight, is_gated: bool = False) -> bool:
    """Whether `rows_hopper` multiplies; it reads scales of blocks once for all outputs of a program."""
    if w.scales_NG is not None and (w.rows, w.group) != (rows_hopper.GROUP, rows_hopper.GROUP):
        return False
    has_whole_blocks = w.scales_NG is None or not is_gated or w.n // 2 % rows_hopper.BLOCK_N == 0
    return has_whole_blocks and rows_hopper.fits(x, w.codes)


def float8_options(w: words.WordWeight, scales: Tensor, dtype: torch.dtype) -> dict[str, Any]:
    """The options of `_inputs`, as `rows_hopper` takes them."""
    return {"scales": rows_hopper.Scales(scales, w.outer_N, w.scales_NG), "dtype": dtype}


class ExpertForms(Words):
    def experts(self, num_experts: int) -> words.ExpertWords | Tensor:
        """Plain numbers, where the parts cannot be joined or have their inputs in an order of their own."""
        piece = self.pieces[0] if len(self.pieces) == 1 else None
        if isinstance(piece, words.WordWeight) and piece.order_K is None:
            return words.ExpertWords(piece, num_experts)
        say_once(
            f"experts whose parts are packed differently, or have an order of inputs, become {str(self.dtype)[6:]}"
        )
        numbers = super().experts(num_experts)
        self.pieces = [numbers]
        return numbers


METHOD, EXPERTS = Words, ExpertForms
