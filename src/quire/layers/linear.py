"""Linear layers: their sizes, their names in checkpoints and how they are divided over ranks.

Used by models. How weights are stored and multiplied is up to the layer's `Method` (quant/).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.layers.activation import activation
from quire.layers.base import Layer, Runtime, frozen, join
from quire.quant.base import Part, Section, Split, Use, even


class Linear(Layer):
    """y = x W^T + b. Several out_features are sections of one fused product, stacked in order.

    `parts`: the sections' names in checkpoints; None: checkpoints have them as one tensor. `split`: whether ranks
    divide the "outputs" or the "inputs"; "nowhere": every rank has everything. `sections`: how the outputs, or the
    inputs, may be cut.
    """

    use = Use.PRODUCT
    sums = True  # where ranks divide the inputs, what they compute is added up here; else by whoever calls
    tied_to: str | None = None  # path of an embedding whose weight this is

    def __init__(
        self,
        in_features: int,
        *out_features: int,
        bias: bool = False,
        parts: Sequence[str] | None = None,
        split: str = "outputs",
        sections: Sequence[Section] | None = None,
    ) -> None:
        super().__init__()
        if not all(isinstance(size, int) and size > 0 for size in (in_features, *out_features)):
            raise ValueError(f"a layer cannot have {in_features!r} inputs and {out_features!r} outputs")
        self.in_features = in_features
        self.out_features = out_features
        self.part_names = parts
        self.split = split
        self.sections = tuple(sections or map(even, (in_features,) if split == "inputs" else out_features))
        self.bias = frozen(torch.empty(sum(out_features))) if bias else None

    def attach(self, runtime: Runtime, path: str) -> None:
        super().attach(runtime, path)
        self.sections = tuple(section._replace(block=runtime.cut_block) for section in self.sections)
        parts = self.parts()
        self.method = self.keep([part._replace(path=self.tied_to or part.path) for part in parts], self.use)
        if self.bias is not None:
            self.biases["bias"] = parts
        self._narrow()

    def _narrow(self) -> None:
        """From here on, sizes are those of this rank."""
        self.is_partial = self.split == "inputs" and self.group.size > 1
        if self.split == "nowhere" or self.group.size == 1:
            return
        widths = [section.width(self.group.rank, self.group.size) for section in self.sections]
        if self.split == "inputs":
            self.in_features = widths[0]
            return
        self.out_features = tuple(widths)
        if self.bias is not None:
            self.bias = frozen(self.bias.new_empty(sum(widths)))

    def parts(self) -> list[Part]:
        if self.part_names is None:
            return [Part(self.path, (sum(self.out_features), self.in_features), self._split(self.sections))]
        parent = self.path.rpartition(".")[0]
        return [
            Part(join(parent, name), (size, self.in_features), self._split((section,)))
            for name, size, section in zip(self.part_names, self.out_features, self.sections, strict=True)
        ]

    def _split(self, sections: tuple[Section, ...]) -> Split | None:
        return None if self.split == "nowhere" else Split(self.split, sections)

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_partial:
            return self.method.apply(x, self.bias)
        y = self.method.apply(x, self.bias if self.group.rank == 0 else None)
        return self.group.sum(y) if self.sums else y


class GatedLinear(Linear):
    """act(gate) * up: both projections and the activation. SiLU has its own kernels. `fused`: checkpoints have both
    projections in one tensor."""

    def __init__(
        self, in_features: int, out_features: int, bias: bool = False, act: str = "silu", fused: bool = False
    ) -> None:
        parts = None if fused else ("gate_proj", "up_proj")
        super().__init__(in_features, out_features, out_features, bias=bias, parts=parts)
        self.act = None if act == "silu" else activation(act)

    def forward(self, x: Tensor, then: Linear | None = None) -> Tensor:
        """`then`: the layer whose inputs these are, and which may want them rounded."""
        if self.act is None:
            silu_mul = self.kernels.silu_mul
            if then is not None:
                silu_mul = then.method.silu_mul(silu_mul)
            return self.method.apply_silu_mul(x, self.bias, silu_mul)
        gate, up = self.method.apply(x, self.bias).chunk(2, -1)
        return self.act(gate) * up


class LMHead(Linear):
    """Hidden states to logits. `tied_to`: path of the embedding whose weight it uses; None: it has its own."""

    use = Use.HEAD

    def __init__(self, in_features: int, out_features: int, bias: bool = False, tied_to: str | None = None) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self.tied_to = tied_to

    def forward(self, x: Tensor) -> Tensor:
        logits = self.method.apply(x, self.bias, self.runtime.logits_dtype)
        if self.group.size == 1:
            return logits
        (section,) = self.sections
        return self.group.gather(logits, [section.width(rank, self.group.size) for rank in range(self.group.size)])
