"""Whole numbers stay packed for the compiled CPU kernels; other forms, which have no kernel there, become bfloat16."""

from quire.ops.packed_linear import cpu as linear
from quire.ops.packed_linear.forms import Affine, Form
from quire.quant.base import Quantized
from quire.quant.plain.packed import Packed, why_not

__all__ = ["METHOD", "PackedForms", "why_not"]


class PackedForms(Quantized, Packed):
    def put_form(self, part_idx: int, form: Form) -> None:
        packed = None
        if isinstance(form, Affine) and form.order_K is None:
            packed = linear.pack_codes(form.codes_NK, form.scales_NG, form.mins_NG, form.bits, form.zero)
        self.put(part_idx, packed or linear.pack_dense(form.numbers()))


METHOD = PackedForms
