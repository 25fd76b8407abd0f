"""Codes stay packed for the compiled CPU kernels; float8, which has no kernel there, becomes bfloat16."""

from collections.abc import Sequence

import torch

from quire.ops.packed_linear import cpu as linear
from quire.ops.packed_linear.forms import Affine, Blocks, Form, Table4
from quire.quant.base import Part, Quantized, Reader
from quire.quant.kept.numbers import Numbers
from quire.quant.plain.packed import Packed, PackedExperts, has_whole_blocks, why_not

__all__ = ["METHOD", "PackedExpertForms", "PackedForms", "why_not"]


class PackedForms(Quantized, Packed):
    keeps = (Affine, Table4, Blocks)

    def put_form(self, part_idx: int, form: Form) -> None:
        self.put(part_idx, linear.pack_form(form))


class PackedExpertForms(PackedForms, PackedExperts):
    pass


def METHOD(reader: Reader, parts: Sequence[Part], dtype: torch.dtype, device: torch.device) -> Quantized:
    return (PackedForms if has_whole_blocks(parts) else Numbers)(reader, parts, dtype, device)


def EXPERTS(reader: Reader, parts: Sequence[Part], dtype: torch.dtype, device: torch.device) -> Quantized:
    return (PackedExpertForms if has_whole_blocks(parts) else Numbers)(reader, parts, dtype, device)
