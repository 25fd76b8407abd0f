"""The base class of layers that have weights or use the runtime: a layer is attached once, and declares its weights.

`worker/build.py` attaches layers and `worker/load.py` loads the weights they declare; neither knows a layer's class.
Constructors only say what is computed: sizes, biases, how weights are divided over ranks.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from types import ModuleType

import torch
from torch import Tensor, nn

from quire.distributed.base import ALONE, Ranks
from quire.ops.attention.reference import AttentionTables
from quire.quant.base import (
    AXES,
    SMALLEST_BLOCK,
    Joined,
    Method,
    MethodMaker,
    Part,
    RawTensor,
    Section,
    Split,
    Use,
    Weight,
)


@dataclass
class StepContext:
    """What attention layers read in a step; the runner refills it before each forward. Lists are by KV group."""

    tables: list[AttentionTables] = field(default_factory=list)
    slots_T: list[Tensor] = field(default_factory=list)
    # Tokens whose final hidden states are wanted: after the last layer's attention only these are computed. None: all.
    output_tokens: Tensor | None = None
    received: Tensor | None = None  # what the stage before computed, in a pipeline's later stages

    def select_outputs(self, x_TD: Tensor) -> Tensor:
        return x_TD if self.output_tokens is None else x_TD.index_select(0, self.output_tokens)


@dataclass(frozen=True)
class Runtime:
    """Where and with what a model's layers run."""

    device: torch.device
    dtype: torch.dtype
    max_len: int  # tokens of the longest context
    block_size: int  # tokens of a KV block
    cache_dtype: torch.dtype  # of what is cached
    kernels: ModuleType  # norms, gated activations and lookups, as in ops/elementwise/reference.py
    logits_dtype: torch.dtype | None  # None: the model's own
    choose: Callable[..., ModuleType]  # (what, **needs): which implementation to use; see worker/choose.py
    find_method: Callable[[str, Use], MethodMaker]  # by a weight's path in the model
    context: StepContext
    # Weights that several layers use, such as an embedding and the head that is tied to it.
    kept: dict[tuple[str, MethodMaker], Method] = field(default_factory=dict)
    ranks: Ranks = ALONE  # which part of the model's layers this process has
    cut_block: int = SMALLEST_BLOCK  # of how many numbers the blocks are that ranks' parts are made of, if possible
    splits_experts: bool = True  # every rank has a part of each expert; else each has some experts whole


class Layer(nn.Module):
    splits: Mapping[str, Split] = {}  # by name: how its own parameters are divided, where ranks do not have all of them

    def attach(self, runtime: Runtime, path: str) -> None:
        """Called once, before weights are loaded; layers inside this one are already attached. `path`: in the model."""
        self.runtime = runtime
        self.group = runtime.ranks.group
        self.path = path
        self.kernels = runtime.kernels
        self.context = runtime.context
        self.methods: list[Method] = []
        self.biases: dict[str, Sequence[Part]] = {}  # parameter -> the parts of the weight whose biases it has

    def keep(self, parts: Sequence[Part], use: Use) -> Method:
        """Makes the method that stores the weight made of `parts`: neighbours of the same method are one product.

        A weight that another layer keeps in the same way is not kept twice.
        """
        runtime = self.runtime
        parts = [part._replace(rank=self.group.rank, num_ranks=self.group.size) for part in parts]
        runs = [(make, list(run)) for make, run in groupby(parts, lambda part: runtime.find_method(part.path, use))]
        key = parts[0].path, runs[0][0]
        if len(parts) == 1 and key in runtime.kept:
            return runtime.kept[key]
        methods = [make(run, runtime.dtype, runtime.device) for make, run in runs]
        self.methods.append(methods[0] if len(methods) == 1 else Joined(methods))
        if len(parts) == 1:
            runtime.kept[key] = methods[0]
        return self.methods[-1]

    def weights(self) -> Iterator[Weight]:
        """What it loads from a checkpoint, layers inside it left out: what its methods and its parameters need."""
        for method in self.methods:
            yield from method.weights()
        for name, _ in self.named_parameters(recurse=False):
            if name in self.biases:
                yield from self.declare_bias(name, self.biases[name])
            else:
                yield self.declare(name)

    def declare(
        self, attribute: str, name: str | None = None, dtype: torch.dtype | None = None, owner: nn.Module | None = None
    ) -> Weight:
        """A parameter of this layer, or of `owner`. `name`: in checkpoints, below this layer's path, if another."""
        module = owner or self
        loaded_dtype = dtype or self.runtime.dtype

        def load(tensor: RawTensor) -> None:
            setattr(module, attribute, frozen(tensor.dense(loaded_dtype, self.runtime.device)))

        shape = tuple(module.get_parameter(attribute).shape)
        return Weight(join(self.path, name or attribute), shape, load, self.splits.get(attribute))

    def declare_bias(self, attribute: str, parts: Sequence[Part]) -> Iterator[Weight]:
        """A parameter with the biases of all parts of a weight. Where ranks divide the inputs, one of them adds it."""
        start = 0
        for part in parts:
            name = f"{part.path}.bias" if part.end else f"{part.path}_bias"
            split = None if part.split is None or part.split.axis == "inputs" else part.split
            load = partial(self._load_bias, attribute, start)
            yield Weight(name, part.shape[:-1], load, split, AXES[len(part.shape)][:-1])
            kept = self.own_part(part)
            start += 0 if kept is None else kept.num_rows

    def own_part(self, part: Part) -> Part | None:
        """What this rank has of it."""
        return part._replace(rank=self.group.rank, num_ranks=self.group.size).kept()

    def _load_bias(self, attribute: str, start: int, tensor: RawTensor) -> None:
        """`start`: of this part's outputs among those of all parts."""
        values = tensor.dense(self.runtime.dtype, self.runtime.device).flatten()
        bias = self.get_parameter(attribute)
        if bias.is_meta:
            bias = frozen(values.new_empty(bias.shape))
            setattr(self, attribute, bias)
        bias.view(-1)[start : start + len(values)] = values

    def loaded(self) -> None:
        """Called once, when all weights are loaded."""

    def tensors(self) -> list[Tensor]:
        """That hold its weights; several layers may have the same."""
        return [*self.parameters(recurse=False), *(held for method in self.methods for held in method.tensors())]


def frozen(values: Tensor) -> nn.Parameter:
    return nn.Parameter(values, requires_grad=False)


def join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def head_sections(num_heads: int, num_kv_heads: int, head_size: int) -> tuple[Section, Section]:
    """How queries, and how keys and values, are divided over ranks: queries stay with the KV head they read. With more
    ranks than KV heads, several ranks have the same KV head, and divide its queries."""
    q = Section(num_heads * head_size, (num_kv_heads, num_heads), "nested")
    return q, Section(num_kv_heads * head_size, (num_kv_heads,), "repeated")
