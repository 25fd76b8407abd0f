"""Token embedding: a table looked up by id; ranks have some of its rows each."""

from types import ModuleType

from torch import Tensor

from quire.layers.base import KeptLayer, Runtime
from quire.quant.base import Part, Section, Split, Use


class Embedding(KeptLayer):
    kernels: ModuleType  # given by `attach`

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.shape = vocab_size, hidden_size

    def attach(self, runtime: Runtime, path: str) -> None:
        super().attach(runtime, path)
        self.kernels = runtime.kernels
        rows = Split("outputs", (Section(self.shape[0], (self.shape[0],)),))
        self.method = runtime.keep([Part(path, self.shape, rows)], Use.ROWS)

    def forward(self, token_ids_T: Tensor) -> Tensor:
        return self.method.rows(token_ids_T, self.kernels.embedding)
