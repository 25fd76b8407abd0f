"""Loads a checkpoint's weights into the model, one tensor at a time: mapped, converted into its layer, unmapped.

Called by the worker after `build`. Strict: every tensor of the checkpoint must be declared, every declared tensor must
be there, and shapes must agree. `checkpoint/` reads the formats, quantization methods keep the weights.
"""

import dataclasses
import math
import warnings
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from quire.checkpoint.find import ModelFiles
from quire.checkpoint.gguf_architectures import gguf_architecture
from quire.checkpoint.safetensors import SafetensorsFolder
from quire.distributed.base import ALONE, Group
from quire.errors import BadModelFileError, UnsupportedModelError
from quire.layers.base import Layer
from quire.layers.weights import CheckpointTensor, pick
from quire.quant.base import ANY, CODES, PLAIN, Check, Weight, check_division
from quire.utils.memory import give_back_freed
from quire.worker.build import Model

MAX_FREED_SHARE = 1 / 512  # how much is loaded, as a share of all so far, before memory freed meanwhile is given back


def load_weights(
    model: nn.Module,
    tensors: Iterator[tuple[str, CheckpointTensor]],
    group: Group = ALONE.group,
    elsewhere: Collection[str] = (),
    upload: Callable[[Tensor], Tensor] | None = None,
) -> int:
    """Loads this rank's part of every tensor; returns how many bytes that was.

    `tensors`: with the model's own names, as `translated` returns them. `elsewhere`: names of those that only other
    stages of a pipeline want. `upload`: takes bytes to the device, of tensors that need no decoding on the CPU.
    """
    declared = declared_weights(model)
    pending = {name for name, (weight, *_) in declared.items() if not weight.optional}
    num_bytes = trimmed_bytes = 0
    for name, tensor in tensors:
        if name in elsewhere:
            continue
        if name not in declared:
            raise BadModelFileError(f"the checkpoint holds {name!r:.100}, which this architecture does not have")
        for weight in declared[name]:
            _check(weight, tensor)
        pending.discard(name)
        own = _own_part(declared[name][0], tensor, group)
        if own is None:
            continue
        num_bytes += own.num_bytes
        _load(declared[name], own, upload)
        if num_bytes - trimmed_bytes > num_bytes * MAX_FREED_SHARE:
            trimmed_bytes = num_bytes
            give_back_freed()
    if pending:
        raise BadModelFileError(
            f"the checkpoint lacks {min(pending)} and {len(pending) - 1} other tensors: it is incomplete"
        )
    for layer in layers(model):
        layer.loaded()
    return num_bytes


def layers(model: nn.Module) -> list[Layer]:
    return [module for module in model.modules() if isinstance(module, Layer)]


def translated(model: Model, tensors: Iterator[tuple[str, CheckpointTensor]]) -> Iterator[tuple[str, CheckpointTensor]]:
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


def division_checks(model: Model, tensors: Iterator[tuple[str, CheckpointTensor]]) -> Iterator[Check]:
    """Whether ranks can divide the model: all of it, built for one rank."""
    for layer in layers(model):
        yield from (method.check_share for method in layer.methods)
    declared = declared_weights(model)
    for name, tensor in tensors:
        for weight in declared.get(name, []):
            yield partial(_check_pieces, weight, tensor)


def _check_pieces(weight: Weight, tensor: CheckpointTensor, rank: int, num_ranks: int) -> None:
    tensor.check_cut(weight.pieces(rank, num_ranks))


def _own_part(weight: Weight, tensor: CheckpointTensor, group: Group) -> CheckpointTensor | None:
    """What this rank has of a tensor; None: other ranks have all of it."""
    if group.size == 1:
        return tensor
    check_division(group.size, partial(_check_pieces, weight, tensor))
    pieces = weight.pieces(group.rank, group.size)
    return tensor.cut(pieces) if pieces else None


def _load(weights: list[Weight], own: CheckpointTensor, upload: Callable[[Tensor], Tensor] | None) -> None:
    if upload is not None and own.type_name in (*PLAIN, *CODES):  # CODES: their layer's method decodes them
        own = own.uploaded(upload)
    raw = own.read()
    if len(weights) > 1:
        raw = dataclasses.replace(raw, shared={})
    for weight in weights:
        weight.load(raw)


def _check(weight: Weight, tensor: CheckpointTensor) -> None:
    if tensor.type_name not in weight.types:
        raise UnsupportedModelError(f"{weight.name} has type {tensor.type_name}, which is not supported yet")
    if not _has_shape(tensor, weight.shape):
        raise BadModelFileError(
            f"{weight.name} has shape {list(tensor.shape)}, its config says {list(weight.shape)}: files do not match"
        )


def _has_shape(tensor: CheckpointTensor, shape: tuple[int, ...]) -> bool:
    same = [size in (ANY, found) for size, found in zip(shape, tensor.shape)]
    return len(shape) == len(tensor.shape) and all(same)


# -- where tensors come from -------------------------------------------------------------------------------------------


def checkpoint_tensors(files: ModelFiles, hf_config: dict[str, Any]) -> Iterator[tuple[str, CheckpointTensor]]:
    return _from_gguf(files, hf_config) if files.kind == "gguf" else _from_safetensors(files)


def _from_gguf(files: ModelFiles, hf_config: dict[str, Any]) -> Iterator[tuple[str, CheckpointTensor]]:
    """With the model's own names: the converters to GGUF have done what `translate` does for other checkpoints."""
    with files.gguf as gguf:
        gguf.forget_vocabulary()
        architecture = gguf_architecture(gguf)
        for tensor in gguf.tensors.values():
            is_row = tensor.name.endswith(".bias") and tensor.shape[:-1] == (1,)  # some biases are such matrices
            shape = tensor.shape[1:] if is_row else tensor.shape
            columns = shape[1:][-1:]  # () for a vector
            num_rows = math.prod(shape) // math.prod(columns)
            stored = CheckpointTensor.of(tensor.type_name, _bytes(gguf.data(tensor)), (num_rows, *columns))
            for name, rows in architecture.pieces(tensor.name, shape, hf_config):
                yield name, stored.cut([(rows,)]) if isinstance(rows, slice) else pick(stored, rows)
            del stored
            gguf.forget(tensor)


def _from_safetensors(files: ModelFiles) -> Iterator[tuple[str, CheckpointTensor]]:
    with SafetensorsFolder(files.path) as checkpoint:
        for tensor in checkpoint.tensors.values():
            if tensor.name.endswith("rotary_emb.inv_freq"):
                continue  # computed from the config; old checkpoints hold it
            yield tensor.name, CheckpointTensor.of(tensor.dtype, _bytes(checkpoint.data(tensor)), tensor.shape)
            checkpoint.forget(tensor)


def _bytes(view: memoryview) -> Tensor:
    if not len(view):
        return torch.empty(0, dtype=torch.uint8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns because the mapping is read-only, but nothing writes to it
        return torch.frombuffer(view, dtype=torch.uint8)
