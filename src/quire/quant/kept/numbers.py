"""Quantized weights as plain numbers in the model's dtype: works everywhere, in as much memory as plain weights."""

from quire.ops.packed_linear.forms import Form
from quire.quant.base import Quantized
from quire.quant.plain.dense import Dense, why_not

__all__ = ["METHOD", "Numbers", "why_not"]


class Numbers(Quantized, Dense):
    def put_form(self, part_idx: int, form: Form) -> None:
        self.put(part_idx, form.numbers().to(self.device, self.dtype))


METHOD = EXPERTS = Numbers
