"""Codes stay packed for the compiled CPU kernels; float8, which has no kernel there, becomes bfloat16."""

from quire.ops.packed_linear import cpu as linear
from quire.ops.packed_linear.forms import Affine, Blocks, Form, Table4
from quire.quant.base import Quantized
from quire.quant.plain.packed import Packed, PackedExperts, why_not

__all__ = ["METHOD", "PackedExpertForms", "PackedForms", "why_not"]


class PackedForms(Quantized, Packed):
    keeps = (Affine, Table4, Blocks)

    def put_form(self, part_idx: int, form: Form) -> None:
        self.put(part_idx, linear.pack_form(form))


class PackedExpertForms(PackedForms, PackedExperts):
    pass


METHOD, EXPERTS = PackedForms, PackedExpertForms
