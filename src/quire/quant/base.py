"""How a linear layer's weight is kept and multiplied: the contract of every file in this folder.

`worker/build.py` gives each linear layer a method, `worker/load.py` feeds it, the layer calls `apply`. Layers know only this.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.ops.ref.gguf import dequantize

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class RawTensor:
    """A tensor as a checkpoint holds it: `raw` is bytes, usually a view into the mapped file, never written to."""

    type_name: str  # GGUF's names: F32, BF16, Q4_1, …
    raw: Tensor  # uint8
    shape: tuple[int, ...]

    def dense(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
        """The numbers, in memory of their own. What needs no decoding goes to the device as it is and is converted there."""
        if torch.device(device).type == "cpu":
            return dequantize(self.type_name, self.raw, self.shape, dtype)
        if self.type_name not in PLAIN:
            return dequantize(self.type_name, self.raw, self.shape, dtype).to(device)
        return self.raw.to(device).view(PLAIN[self.type_name]).view(self.shape).to(dtype)


class LinearMethod(ABC):
    """One layer's weight [sum(shard_sizes), in_features]; shards (q, k, v; gate, up) may come in different types."""

    def __init__(
        self, in_features: int, shard_sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device, keep_quantized: bool
    ) -> None:
        """`keep_quantized`: a checkpoint's own quantization may stay as it is; else everything becomes `dtype`."""
        self.in_features = in_features
        self.shard_sizes = shard_sizes
        self.dtype = dtype
        self.device = device
        self.keep_quantized = keep_quantized

    @abstractmethod
    def load(self, shard_idx: int, tensor: RawTensor) -> None:
        """Takes one shard; the bytes of `tensor` are not kept."""

    def tie(self, weight: Tensor) -> bool:
        """Use this very tensor (an embedding's) as the weight, if the method can; else it is loaded like any other."""
        return False

    @abstractmethod
    def apply(self, x: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None = None) -> Tensor:
        """x @ weight.T + bias, in `out_dtype` or x's own."""

    def apply_silu_mul(self, x: Tensor, bias: Tensor | None, silu_mul: Callable[[Tensor], Tensor]) -> Tensor:
        """silu(gate) * up of the two shards; with `silu_mul` where the method has no way of its own."""
        return silu_mul(self.apply(x, bias))

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """What the weight occupies."""
