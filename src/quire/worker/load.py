"""Loads a checkpoint's weights into the model, one tensor at a time: mapped, converted into its layer, unmapped.

Called by the worker after `build`. Strict: every tensor of the checkpoint must be declared, every declared tensor must
be there, and shapes must agree. `checkpoint/` reads the formats, quantization methods keep the weights.
"""

import dataclasses
import math
import warnings
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from quire.checkpoint.find import ModelFiles
from quire.checkpoint.gguf_architectures import gguf_architecture
from quire.checkpoint.safetensors import SafetensorsFolder
from quire.distributed.base import ALONE, Group
from quire.errors import BadModelFileError, UnsupportedModelError
from quire.layers.base import Layer
from quire.ops.transfer import Upload
from quire.quant.base import ANY, CODES, PLAIN, RawTensor, Weight, check_division
from quire.worker.build import Model


def load_weights(
    model: nn.Module,
    tensors: Iterator[tuple[str, RawTensor]],
    group: Group = ALONE.group,
    elsewhere: Collection[str] = (),
) -> int:
    """Loads this rank's part of every tensor; returns how many bytes that was.

    `tensors`: with the model's own names, as `translated` returns them. `elsewhere`: names of those that only other
    stages of a pipeline want.
    """
    declared = declared_weights(model)
    pending = {name for name, (weight, *_) in declared.items() if not weight.optional}
    num_bytes = 0
    for name, tensor in tensors:
        if name in elsewhere:
            continue
        if name not in declared:
            raise BadModelFileError(f"the checkpoint holds {name!r:.100}, which this architecture does not have")
        first, *others = declared[name]
        _check(first, tensor)
        own = _own_part(first, tensor, group)
        pending.discard(name)
        if own is None:
            continue
        num_bytes += own.raw.numel()
        if others:
            own = dataclasses.replace(own, shared={})
        for weight in declared[name]:
            _check(weight, tensor)
            weight.load(own)
    if pending:
        raise BadModelFileError(
            f"the checkpoint lacks {min(pending)} and {len(pending) - 1} other tensors: it is incomplete"
        )
    for layer in layers(model):
        layer.loaded()
    return num_bytes


def layers(model: nn.Module) -> list[Layer]:
    return [module for module in model.modules() if isinstance(module, Layer)]


def translated(model: Model, tensors: Iterator[tuple[str, RawTensor]]) -> Iterator[tuple[str, RawTensor]]:
    """A checkpoint's tensors with the model's names: a family may rename, reorder or divide them."""
    for name, tensor in tensors:
        yield from model.translate(name, tensor)


def declared_weights(model: nn.Module) -> dict[str, list[Weight]]:
    """Every tensor that the model wants, by name. Several layers may want one: a tied head and its embedding."""
    declared: dict[str, list[Weight]] = {}
    for layer in layers(model):
        for weight in layer.weights():
            declared.setdefault(weight.name, []).append(weight)
    return declared


def _own_part(weight: Weight, tensor: RawTensor, group: Group) -> RawTensor | None:
    """What this rank has of a tensor; None: other ranks have all of it."""
    if group.size == 1:
        return tensor

    def check(rank: int, num_ranks: int) -> None:
        tensor.check_cut(weight.pieces(rank, num_ranks))

    check_division(group.size, check)
    pieces = weight.pieces(group.rank, group.size)
    return tensor.cut(pieces) if pieces else None


def _check(weight: Weight, tensor: RawTensor) -> None:
    if tensor.type_name not in weight.types:
        raise UnsupportedModelError(f"{weight.name} has type {tensor.type_name}, which is not supported yet")
    if not _has_shape(tensor, weight.shape):
        raise BadModelFileError(
            f"{weight.name} has shape {list(tensor.shape)}, its config says {list(weight.shape)}: files do not match"
        )


def _has_shape(tensor: RawTensor, shape: tuple[int, ...]) -> bool:
    same = [size in (ANY, found) for size, found in zip(shape, tensor.shape)]
    return len(shape) == len(tensor.shape) and all(same)


# -- where tensors come from -------------------------------------------------------------------------------------------


def checkpoint_tensors(files: ModelFiles, hf_config: dict[str, Any]) -> Iterator[tuple[str, RawTensor]]:
    return _from_gguf(files, hf_config) if files.kind == "gguf" else _from_safetensors(files)


def _from_gguf(files: ModelFiles, hf_config: dict[str, Any]) -> Iterator[tuple[str, RawTensor]]:
    """With the model's own names: the converters to GGUF have done what `translate` does for other checkpoints."""
    with files.gguf as gguf:
        architecture = gguf_architecture(gguf)
        for tensor in gguf.tensors.values():
            is_bias = tensor.name.endswith(".bias")
            shape = tensor.shape[-1:] if is_bias else tensor.shape  # some biases are matrices of one row
            columns = shape[1:][-1:]  # () for a vector
            rows_RX = _bytes(gguf.data(tensor)).view(math.prod(shape) // math.prod(columns), -1)
            for name, rows in architecture.pieces(tensor.name, shape, hf_config):
                part_RX = rows_RX[rows]
                yield name, RawTensor(tensor.type_name, part_RX.flatten(), (len(part_RX), *columns))
            del rows_RX
            gguf.forget(tensor)


def _from_safetensors(files: ModelFiles) -> Iterator[tuple[str, RawTensor]]:
    with SafetensorsFolder(files.path) as checkpoint:
        for tensor in checkpoint.tensors.values():
            if tensor.name.endswith("rotary_emb.inv_freq"):
                continue  # computed from the config; old checkpoints hold it
            yield tensor.name, RawTensor(tensor.dtype, _bytes(checkpoint.data(tensor)), tensor.shape)
            checkpoint.forget(tensor)


def uploaded(tensors: Iterator[tuple[str, RawTensor]], device: torch.device) -> Iterator[tuple[str, RawTensor]]:
    """The same tensors; those that need no decoding on the CPU are on the GPU."""
    upload = Upload(device)
    for name, tensor in tensors:
        if tensor.type_name in (*PLAIN, *CODES):  # CODES: their layer's method decodes them
            tensor = RawTensor(tensor.type_name, upload(tensor.raw), tensor.shape)
        yield name, tensor


def _bytes(view: memoryview) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns because the mapping is read-only, but nothing writes to it
        return torch.frombuffer(view, dtype=torch.uint8)
