"""Weights as plain tensors in the model's dtype, multiplied by torch: works everywhere, and the only way in float32."""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from quire.quant.base import Method, Part, RawTensor


class Dense(Method):
    weight: Tensor  # [outputs of all parts, inputs]; exists once a part is loaded

    def __init__(self, parts: Sequence[Part], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(parts, dtype, device)
        self.ends = list(accumulate(part.num_rows for part in self.parts))

    def load_part(self, part_idx: int, tensor: RawTensor) -> None:
        self.put(part_idx, tensor.dense(self.dtype, self.device))

    def put(self, part_idx: int, values: Tensor) -> None:
        """A part's numbers become its rows of the weight."""
        values = values.view(-1, values.shape[-1])
        if len(self.parts) == 1:
            self.weight = values  # not copied
            return
        if not hasattr(self, "weight"):
            self.weight = torch.empty(self.ends[-1], values.shape[1], dtype=self.dtype, device=self.device)
        self.weight[self.ends[part_idx] - len(values) : self.ends[part_idx]] = values

    def numbers(self) -> Tensor:
        return self.weight


METHOD = EXPERTS = Dense


def why_not(device: torch.device, dtype: torch.dtype) -> str | None:
    return None
