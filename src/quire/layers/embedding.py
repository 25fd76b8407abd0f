"""Token embedding: a table looked up by token id; its rows are divided over ranks."""

from torch import Tensor

from quire.layers.base import Layer, Runtime
from quire.quant.base import Part, Section, Split, Use


class Embedding(Layer):
    def __init__(self, vocab_size: int, hidden_size: int, is_tied: bool = False) -> None:
        """`is_tied`: the table is the head's weight too."""
        super().__init__()
        self.shape = vocab_size, hidden_size
        self.use = Use.TIED_ROWS if is_tied else Use.ROWS

    def attach(self, runtime: Runtime, path: str) -> None:
        super().attach(runtime, path)
        rows = Split("outputs", (Section(self.shape[0], (self.shape[0],)),))
        self.method = self.keep([Part(path, self.shape, rows)], self.use)

    def forward(self, token_ids_T: Tensor) -> Tensor:
        return self.method.rows(token_ids_T, self.kernels.embedding)
