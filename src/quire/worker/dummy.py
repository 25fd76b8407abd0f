"""Random weights instead of a checkpoint's (`--load-format dummy`): every tensor that is needed, in a type it may have.

Called by the worker, before `load_weights`. Drawn on the device that will hold them, one tensor at a time.
"""

import hashlib
import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from quire.checkpoint.gguf import BLOCK
from quire.layers.weights import CheckpointTensor
from quire.ops.dequantize.gguf import dequantize
from quire.quant._dummy import FLOAT8_MASK, STD, set_block_scales
from quire.quant.base import CODES, PLAIN, Fill, Weight
from quire.worker.load import declared_weights

# How names of a router's biases end. They are zero: any other would send all tokens to the same experts.
ROUTER_BIASES = (".gate.bias", ".router.bias", "correction_bias")


def dummy_tensors(model: nn.Module, seed: int, device: torch.device) -> Iterator[tuple[str, CheckpointTensor]]:
    """A tensor depends on its name and the seed alone: ranks and stages draw the same, whatever part they keep."""
    generator = torch.Generator(device)
    for name, (weight, *_) in declared_weights(model).items():
        if not weight.optional:
            digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
            yield name, _drawn(weight, generator.manual_seed(int.from_bytes(digest[:7], "little")))


def _drawn(weight: Weight, generator: torch.Generator) -> CheckpointTensor:
    if weight.fill is not None:
        return _filled(weight, weight.fill, generator.device)
    type_name = "BF16" if "BF16" in weight.types else next(iter(weight.types))
    if type_name in PLAIN:
        return _raw(type_name, _normal(weight, generator).to(PLAIN[type_name]))
    if type_name in BLOCK:
        return CheckpointTensor.of(type_name, _random_blocks(weight.shape, type_name, generator), weight.shape)
    return _raw(type_name, _random_codes(weight.shape, type_name, generator))


def _filled(weight: Weight, fill: Fill, device: torch.device) -> CheckpointTensor:
    (type_name, *_) = weight.types
    dtype = (PLAIN | CODES)[type_name]
    if not callable(fill):
        return _raw(type_name, torch.full(weight.shape, fill, dtype=dtype, device=device))
    return _raw(type_name, fill().to(device, dtype).expand(weight.shape).clone(memory_format=torch.contiguous_format))


def _normal(weight: Weight, generator: torch.Generator) -> Tensor:
    """Norms are around 1: activations must not vanish. Embeddings are large: tokens, and so their experts, differ."""
    values = torch.zeros(weight.shape, dtype=torch.bfloat16, device=generator.device)
    if weight.name.endswith(ROUTER_BIASES):
        return values
    is_embedding = "embed" in weight.name and len(weight.shape) == 2
    values.normal_(0.0, 1.0 if is_embedding else STD, generator=generator)
    is_norm = len(weight.shape) == 1 and not weight.name.endswith("bias")
    values += is_norm
    return values


def _random_codes(shape: tuple[int, ...], type_name: str, generator: torch.Generator) -> Tensor:
    dtype = CODES[type_name]
    num_bytes = math.prod(shape) * dtype.itemsize
    words = torch.empty(-(-num_bytes // 8), dtype=torch.int64, device=generator.device)
    words.random_(-(2**63), None, generator=generator)
    codes = words.view(torch.uint8)[:num_bytes]
    if type_name == "F8_E4M3":
        codes &= FLOAT8_MASK
    return codes.view(dtype).view(shape)


def _random_blocks(shape: tuple[int, ...], type_name: str, generator: torch.Generator) -> Tensor:
    """Of a GGUF file: random codes and scales of groups, and in all blocks the same scales of these."""
    elements, block_bytes = BLOCK[type_name]
    blocks = _random_codes((math.prod(shape) // elements, block_bytes), "U8", generator)
    set_block_scales(type_name, blocks, 1.0)
    spread = dequantize(type_name, blocks[:64].cpu().flatten(), (64 * elements,)).std().item()
    set_block_scales(type_name, blocks, STD / spread)
    return blocks.flatten()


def _raw(type_name: str, values: Tensor) -> CheckpointTensor:
    return CheckpointTensor.of(type_name, values.flatten().view(torch.uint8), tuple(values.shape))
