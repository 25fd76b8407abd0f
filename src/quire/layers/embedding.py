"""Token embedding: a table looked up by id."""

import torch
from torch import Tensor, nn

from quire.ops.ref import elementwise as reference


class Embedding(nn.Module):
    kernels = reference  # attached by worker/build.py

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size), requires_grad=False)

    def forward(self, token_ids_T: Tensor) -> Tensor:
        return self.kernels.embedding(token_ids_T, self.weight)
