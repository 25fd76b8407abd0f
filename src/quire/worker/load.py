"""Weights stream from the checkpoint into the model: each tensor is mapped, converted into its layer, and let go.

Called by the worker after `build`. Strict: every tensor is declared, everything declared comes, shapes agree. Formats are
`checkpoint/`'s business, storage is the quantization method's.
"""

import dataclasses
import math
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from quire.checkpoint.find import ModelFiles
from quire.checkpoint.gguf_architectures import gguf_architecture
from quire.checkpoint.safetensors import SafetensorsFolder
from quire.errors import BadModelFileError, UnsupportedModelError
from quire.layers.base import Layer
from quire.ops.transfer import Upload
from quire.quant.base import PLAIN, RawTensor, Weight

DUMMY_STD = 0.02


def load_weights(model: nn.Module, tensors: Iterator[tuple[str, RawTensor]]) -> None:
    """`tensors`: under the model's own names, as `translated` gives them."""
    declared = declared_weights(model)
    pending = set(declared)
    for name, tensor in tensors:
        if name not in declared:
            raise BadModelFileError(f"the checkpoint holds {name!r:.100}, which this architecture does not have")
        if len(declared[name]) > 1:
            tensor = dataclasses.replace(tensor, shared={})
        for weight in declared[name]:
            _load(weight, tensor)
        pending.discard(name)
    if pending:
        raise BadModelFileError(
            f"the checkpoint lacks {min(pending)} and {len(pending) - 1} other tensors: it is incomplete"
        )
    for layer in layers(model):
        layer.loaded()


def layers(model: nn.Module) -> list[Layer]:
    return [module for module in model.modules() if isinstance(module, Layer)]


def translated(model: nn.Module, tensors: Iterator[tuple[str, RawTensor]]) -> Iterator[tuple[str, RawTensor]]:
    """A checkpoint's tensors under the model's names: a family may rename, reorder or divide them."""
    for name, tensor in tensors:
        yield from model.translate(name, tensor)


def declared_weights(model: nn.Module) -> dict[str, list[Weight]]:
    """Every tensor the model wants, by its name, with who wants it: a head that is tied wants its embedding's."""
    declared: dict[str, list[Weight]] = {}
    for layer in layers(model):
        for weight in layer.weights():
            declared.setdefault(weight.name, []).append(weight)
    return declared


def _load(weight: Weight, tensor: RawTensor) -> None:
    if tensor.type_name not in weight.types:
        raise UnsupportedModelError(f"{weight.name} has type {tensor.type_name}, which is not supported yet")
    if tuple(tensor.shape) != weight.shape:
        raise BadModelFileError(
            f"{weight.name} has shape {list(tensor.shape)}, its config says {list(weight.shape)}: files do not match"
        )
    weight.load(tensor)


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
        fast = tensor.type_name in (*PLAIN, "U8")  # bytes become numbers in their layer's method
        yield name, RawTensor(tensor.type_name, upload(tensor.raw), tensor.shape) if fast else tensor


def dummy_tensors(model: nn.Module, seed: int, device: torch.device) -> Iterator[tuple[str, RawTensor]]:
    """Random normal weights for all that is wanted; vectors (norms, biases) around one, so that signals survive."""
    generator = torch.Generator(device).manual_seed(seed)
    for name, (weight, *_) in declared_weights(model).items():
        values = torch.empty(weight.shape, dtype=torch.bfloat16, device=device).normal_(
            0.0, DUMMY_STD, generator=generator
        )
        values += len(weight.shape) == 1
        yield name, RawTensor("BF16", values.flatten().view(torch.uint8), weight.shape)


def _bytes(view: memoryview) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the mapping is read-only and nobody writes to it
        return torch.frombuffer(view, dtype=torch.uint8)
