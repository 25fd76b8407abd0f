"""`--quantization gguf`: weights used in products stay in the file's 4- or 8-bit blocks, if kernels know the type."""

from collections.abc import Callable
from typing import Any

from quire.ops.packed_linear import cpu as linear
from quire.quant.base import Choice, MethodMaker, RawTensor
from quire.quant.plain.packed import Packed


class Blocks(Packed):
    stays_packed = True

    def pack(self, tensor: RawTensor) -> linear.PackedWeight:
        if linear.gguf_packable(tensor.type_name, *tensor.shape):
            return linear.pack_gguf(tensor.type_name, tensor.raw, *tensor.shape)
        return super().pack(tensor)


def quantization(settings: dict[str, Any]) -> Callable[[str, Choice], MethodMaker]:
    return lambda path, ways: Blocks if ways.plain is Packed else ways.plain
