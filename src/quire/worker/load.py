"""Weights stream from the checkpoint into the model: each tensor is mapped, converted into its layer, and let go.

Called by the worker after `build`. Strict: every tensor has a taker, every taker gets its tensor, shapes agree. Formats are
`checkpoint/`'s business, storage is the quantization method's.
"""

import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from quire.checkpoint.find import ModelFiles
from quire.checkpoint.gguf import BLOCK
from quire.checkpoint.gguf_architectures import gguf_architecture
from quire.checkpoint.safetensors import SafetensorsFolder
from quire.errors import BadModelFileError, UnsupportedModelError
from quire.layers.linear import Linear
from quire.layers.weights import Taker
from quire.ops.transfer import Upload
from quire.quant.base import PLAIN, RawTensor

DUMMY_STD = 0.02


def load_weights(model: nn.Module, tensors: Iterator[tuple[str, RawTensor]], dtype: torch.dtype, device: torch.device) -> None:
    """`tensors`: under the model's own names, as `translated` gives them."""
    takers = _takers(model, dtype, device)
    pending = set(takers)
    tied = {source: target for target, source in model.tied.items()}
    for name, tensor in tensors:
        if name in model.tied:
            continue  # some checkpoints hold the tied copy as well
        if name not in takers:
            raise BadModelFileError(f"the checkpoint holds {name!r:.100}, which this architecture does not have")
        _take(name, takers[name], tensor)
        pending.discard(name)
        if name in tied:
            _tie(model, tied[name], takers, tensor)
            pending.discard(tied[name])
    if pending:
        raise BadModelFileError(f"the checkpoint lacks {min(pending)} and {len(pending) - 1} other tensors: it is incomplete")


def translated(model: nn.Module, tensors: Iterator[tuple[str, RawTensor]]) -> Iterator[tuple[str, RawTensor]]:
    """A checkpoint's tensors under the model's names: a family may rename, reorder or divide them."""
    for name, tensor in tensors:
        yield from model.translate(name, tensor)


def wanted_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: shape for name, (shape, _) in _takers(model, torch.float32, torch.device("cpu")).items()}


def _take(name: str, taker: Taker, tensor: RawTensor) -> None:
    shape, take = taker
    if tensor.type_name not in BLOCK:
        raise UnsupportedModelError(f"{name} has type {tensor.type_name}, which is not supported yet")
    if tuple(tensor.shape) != shape:
        raise BadModelFileError(f"{name} has shape {list(tensor.shape)}, its config says {list(shape)}: files do not match")
    take(tensor)


def _tie(model: nn.Module, target: str, takers: dict[str, Taker], tensor: RawTensor) -> None:
    """The target shares the source's numbers: the very tensor where its method can, else a form of its own."""
    method = model.get_submodule(target.removesuffix(".weight")).method
    if not method.tie(model.get_parameter(model.tied[target])):
        _take(target, takers[target], tensor)


def _takers(model: nn.Module, dtype: torch.dtype, device: torch.device) -> dict[str, Taker]:
    """Every tensor the model wants, by its name in a checkpoint."""
    parts: dict[str, dict[int, str]] = {}  # fused module's name -> shard -> checkpoint's name
    for name, (fused, shard_idx) in model.shards.items():
        parts.setdefault(fused, {})[shard_idx] = name
    takers: dict[str, Taker] = {}
    for path, module in model.named_modules():
        parent, _, own_name = path.rpartition(".")
        if isinstance(module, Linear):
            shards = [range(i, i + 1) for i in range(len(module.shard_sizes))]
            if own_name not in parts:
                shards = [range(len(module.shard_sizes))]  # the checkpoint has them as one
            for shard in shards:
                shard_name = parts.get(own_name, {}).get(shard.start, own_name)
                full = f"{parent}.{shard_name}" if parent else shard_name
                size = sum(module.shard_sizes[i] for i in shard)
                takers[f"{full}.weight"] = (size, module.in_features), _weight_taker(module, shard)
                if module.bias is not None:
                    takers[f"{full}.bias"] = (size,), _bias_taker(module, shard.start, size, dtype, device)
        elif hasattr(module, "takers"):
            takers.update(module.takers(path, dtype, device))
        else:
            for name, parameter in module.named_parameters(recurse=False):
                takers[f"{path}.{name}"] = tuple(parameter.shape), _parameter_taker(module, name, dtype, device)
    return takers


def _weight_taker(module: Linear, shards: range) -> Callable[[RawTensor], None]:
    def take(tensor: RawTensor) -> None:
        rows = tensor.raw.view(tensor.shape[0], -1).split([module.shard_sizes[i] for i in shards])
        for shard_idx, part in zip(shards, rows):
            module.method.load(shard_idx, RawTensor(tensor.type_name, part.flatten(), (len(part), *tensor.shape[1:])))

    return take


def _bias_taker(module: Linear, shard_idx: int, size: int, dtype: torch.dtype, device: torch.device) -> Callable[[RawTensor], None]:
    def take(tensor: RawTensor) -> None:
        if module.bias.is_meta:
            module.bias = nn.Parameter(torch.empty(module.bias.shape, dtype=dtype, device=device), requires_grad=False)
        start = sum(module.shard_sizes[:shard_idx])
        module.bias[start : start + size] = tensor.dense(dtype, device)

    return take


def _parameter_taker(module: nn.Module, name: str, dtype: torch.dtype, device: torch.device) -> Callable[[RawTensor], None]:
    def take(tensor: RawTensor) -> None:
        setattr(module, name, nn.Parameter(tensor.dense(dtype, device), requires_grad=False))

    return take


# -- where tensors come from -------------------------------------------------------------------------------------------


def checkpoint_tensors(files: ModelFiles, hf_config: dict[str, Any]) -> Iterator[tuple[str, RawTensor]]:
    return _from_gguf(files, hf_config) if files.kind == "gguf" else _from_safetensors(files)


def _from_gguf(files: ModelFiles, hf_config: dict[str, Any]) -> Iterator[tuple[str, RawTensor]]:
    """Under the model's own names: what a family's `translate` does to a Hugging Face checkpoint, converters have done here."""
    with files.gguf as gguf:
        row = gguf_architecture(gguf)
        for tensor in gguf.tensors.values():
            shape = tensor.shape[-1:] if tensor.name.endswith(".bias") else tensor.shape  # some are matrices of one row
            columns = shape[1:][-1:]  # none, if it is a vector
            rows_RX = _bytes(gguf.data(tensor)).view(math.prod(shape) // math.prod(columns), -1)
            for name, rows in row.pieces(tensor.name, shape, hf_config):
                part_RX = rows_RX[rows]
                yield name, RawTensor(tensor.type_name, part_RX.flatten(), (len(part_RX), *columns))
            del rows_RX
            gguf.forget(tensor)


def _from_safetensors(files: ModelFiles) -> Iterator[tuple[str, RawTensor]]:
    with SafetensorsFolder(files.path) as checkpoint:
        for tensor in checkpoint.tensors.values():
            if tensor.name.endswith("rotary_emb.inv_freq"):
                continue  # derived; old checkpoints hold it
            yield tensor.name, RawTensor(tensor.dtype, _bytes(checkpoint.data(tensor)), tensor.shape)
            checkpoint.forget(tensor)


def uploaded(tensors: Iterator[tuple[str, RawTensor]], device: torch.device) -> Iterator[tuple[str, RawTensor]]:
    """The same, what is not decoded on the CPU lying on the GPU already."""
    upload = Upload(device)
    for name, tensor in tensors:
        fast = tensor.type_name in (*PLAIN, "U8")  # bytes become numbers in `translate`
        yield name, RawTensor(tensor.type_name, upload(tensor.raw), tensor.shape) if fast else tensor


def dummy_tensors(model: nn.Module, seed: int, device: torch.device) -> Iterator[tuple[str, RawTensor]]:
    """Random normal weights for every taker; vectors (norms, biases) around one, so that signals survive."""
    generator = torch.Generator(device).manual_seed(seed)
    for name, shape in wanted_shapes(model).items():
        if name not in model.tied:
            values = torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(0.0, DUMMY_STD, generator=generator)
            values += len(shape) == 1
            yield name, RawTensor("BF16", values.flatten().view(torch.uint8), shape)


def _bytes(view: memoryview) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the mapping is read-only and nobody writes to it
        return torch.frombuffer(view, dtype=torch.uint8)
