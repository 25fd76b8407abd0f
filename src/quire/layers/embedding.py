"""Token embedding: a table looked up by token id; its rows are divided over ranks."""

from torch import Tensor

from quire.layers.base import Layer, Runtime
from quire.ops.elementwise.reference import embedding
from quire.quant.base import Part, Split, Use, even


class Embedding(Layer):
    def __init__(self, vocab_size: int, hidden_size: int, is_tied: bool = False, wide_ids: bool = False) -> None:
        """`is_tied`: the table is the head's weight too. `wide_ids`: they are 64-bit, which only torch looks up."""
        super().__init__()
        self.shape = vocab_size, hidden_size
        self.use = Use.TIED_ROWS if is_tied else Use.ROWS
        self.wide_ids = wide_ids

    def attach(self, runtime: Runtime, path: str) -> None:
        super().attach(runtime, path)
        section = even(self.shape[0], runtime.cut_block)
        self.method = self.keep([Part(path, self.shape, Split("outputs", (section,)))], self.use)
        first, _, count = section.share(self.group.rank, self.group.size)
        self.first_id = None if self.group.size == 1 else section.size * first // count

    def forward(self, ids_T: Tensor) -> Tensor:
        lookup = embedding if self.wide_ids else self.kernels.embedding
        return self.group.sum(self.method.rows(ids_T, lookup, self.first_id))
