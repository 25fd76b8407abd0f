"""What a model would need on this machine, from its headers alone, and which models there are: no weights are read.

Called by `quire info` and `quire models`, by dotted path. Returns plain numbers and strings.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from quire import registry
from quire.checkpoint.find import ModelFiles, find
from quire.checkpoint.gguf import BLOCK
from quire.checkpoint.gguf_architectures import GGUF_ARCHITECTURES, gguf_architecture
from quire.checkpoint.hf_config import read_config
from quire.checkpoint.safetensors import SafetensorsFolder
from quire.config import EngineConfig, resolved
from quire.kv.groups import form_layout
from quire.layers.base import Layer
from quire.layers.linear import LMHead
from quire.models._parity import LARGEST_ERROR
from quire.ops.dequantize import gguf as codec
from quire.ops.packed_linear import words
from quire.ops.packed_linear.forms import Blocks, Plain
from quire.quant.base import Weight
from quire.worker.build import FALLBACK, Model, build, empty, model_module
from quire.worker.choose import DTYPES, Chooser, runs_on_triton
from quire.worker.cpu.device import kv_memory_bytes
from quire.worker.kv_cache import kv_specs
from quire.worker.load import declared_weights, layers
from quire.worker.worker import device_module

KINDS = ("attention", "MLP", "experts", "embedding", "head", "norms and others")


def describe(config: EngineConfig) -> dict[str, Any]:
    """`config` is resolved."""
    if config.device.device == "cuda":
        device_module(config).open(torch.device("cuda"))
    files = find(config.model.model)
    hf_config = read_config(files)
    choose = Chooser(config)
    model = build(config, hf_config, choose)
    specs = kv_specs(model, choose.cache_dtype)
    layout = form_layout(specs, resolved(config.cache.block_size))
    weights = _weights(files, config, hf_config, model)
    weight_bytes = sum(row["bytes"] for row in weights)
    return {
        "architecture": hf_config["architectures"][0],
        "model_file": _model_file(model_module(hf_config).__name__),
        "num_parameters": sum(_num_values(weight) for weight, *_ in declared_weights(model).values()),
        "num_layers": hf_config["num_hidden_layers"],
        "dtype": config.model.dtype,
        "quantization": config.model.quantization,
        "weight_types": {} if config.model.load_format == "dummy" else _weight_types(files),
        "weights": weights,
        "weight_bytes": weight_bytes,
        "kv_cache_dtype": config.cache.kv_cache_dtype,
        "kv_bytes_per_token": math.ceil(sum(spec.bytes_per_token for spec in specs.values())),
        "kv_groups": [f"{len(group.caches)} layers, {group.spec.kind}" for group in layout.groups],
        "kv_memory_bytes": config.cache.kv_cache_memory_bytes or _kv_memory_bytes(config, weight_bytes),
        "max_model_len": config.model.max_model_len,
        "attention": choose.taken.get("attention") or choose.taken["latent attention"],
        "linear": choose.taken["linear"],
        "passed_over": choose.passed_over,
    }


def library() -> list[dict[str, Any]]:
    """Every architecture that has a model file.

    `parity`: the largest difference of a logprob from that of transformers, as tests/models/report.py measured; None:
    not measured.
    """
    in_gguf = {row.architecture for row in GGUF_ARCHITECTURES.values()}
    in_gguf |= {variant.architecture for row in GGUF_ARCHITECTURES.values() for _, variant in row.variants}
    tiny = registry.literals("quire.models", "TINY")
    found = []
    for name, architectures in registry.literals("quire.models", "ARCHITECTURES").items():
        kinds = kv_kinds(tiny[name])
        for architecture in architectures:
            found.append(
                {
                    "architecture": architecture,
                    "file": _model_file(f"quire.models.{name}"),
                    "kv": kinds,
                    "gguf": architecture in in_gguf or architectures[0] in in_gguf,
                    "parity": LARGEST_ERROR.get(architecture),
                }
            )
    return found


def kv_kinds(fields: dict[str, Any]) -> list[str]:
    """The kinds of caches of a model with this config.json: full, sliding, latent, …"""
    with TemporaryDirectory() as folder:  # so that it is read like any other config.json
        (Path(folder) / "config.json").write_text(json.dumps(fields))
        model = empty(read_config(find(folder)), "bfloat16")
    return sorted({spec.kind for spec in kv_specs(model, torch.bfloat16).values()})


def _model_file(module_name: str) -> str | None:
    """None: the fallback."""
    return None if module_name == FALLBACK else f"{module_name.removeprefix('quire.').replace('.', '/')}.py"


def _kv_memory_bytes(config: EngineConfig, weight_bytes: int) -> int:
    """On a GPU an estimate: how much a step needs is known only after one has run."""
    if config.device.device == "cpu":
        return kv_memory_bytes(config)
    free, total = torch.cuda.mem_get_info()
    return max(0, int(total * config.cache.gpu_memory_utilization) - (total - free) - weight_bytes)


def _weight_types(files: ModelFiles) -> dict[str, int]:
    """How many tensors of each type the checkpoint holds."""
    if files.kind == "gguf":
        return dict(Counter(tensor.type_name for tensor in files.gguf.tensors.values()))
    with SafetensorsFolder(files.path) as folder:
        return dict(Counter(tensor.dtype for tensor in folder.tensors.values()))


# ---- what weights take, by kinds of layers ---------------------------------------------------------------------------


def _weights(files: ModelFiles, config: EngineConfig, hf_config: dict[str, Any], model: Model) -> list[dict[str, Any]]:
    """For each kind of layer, and each way to keep its weights: the bits that a number takes, and the bytes of all."""
    itemsize = DTYPES[config.model.dtype].itemsize
    in_file = _gguf_types(files, hf_config) if files.kind == "gguf" else {}
    bits_of = _bits_on_gpus if runs_on_triton(config) else _bits_in_file
    sums: dict[tuple[str, str], list[int]] = {}  # (kind, method) -> [numbers, bytes]
    for kind, weight in _by_kind(model):
        num_values, num_bytes = _num_values(weight), weight.num_bytes
        if weight.stays_packed:
            num_bytes = int(
                num_values * bits_of(in_file.get(weight.name) or next(iter(weight.types)), config.model.dtype) / 8
            )
        so_far = sums.setdefault((kind, _method(weight, config)), [0, 0])
        so_far[0] += num_values
        so_far[1] += num_values * itemsize if num_bytes is None else num_bytes
    return [
        {"kind": kind, "method": method, "bits": round(8 * num_bytes / num_values, 2), "bytes": num_bytes}
        for (kind, method), (num_values, num_bytes) in sorted(sums.items(), key=lambda row: KINDS.index(row[0][0]))
        if num_values
    ]


def _by_kind(model: Model) -> Iterator[tuple[str, Weight]]:
    """What is in memory: a tensor that several layers want is there once, unless they keep it packed."""
    seen: set[str] = set()
    for layer in layers(model):
        matrices = {weight.name for method in layer.methods for weight in method.weights()}
        for weight in layer.weights():
            if weight.stays_packed or weight.name not in seen:
                yield _kind(layer, weight.name, weight.name in matrices), weight
            if not weight.stays_packed:
                seen.add(weight.name)


def _kind(layer: Layer, name: str, is_matrix: bool) -> str:
    if isinstance(layer, LMHead):
        return "head"
    if re.search(r"embed|\bwte\b|\bwpe\b", name):
        return "embedding"
    if not is_matrix:
        return "norms and others"
    if ".experts." in name:
        return "experts"
    return "attention" if re.search(r"attn|attention", name) else "MLP"


def _method(weight: Weight, config: EngineConfig) -> str:
    """The quantization's name, or the dtype; both, where quantized weights become plain numbers."""
    if weight.stays_packed:
        return config.model.quantization
    if weight.num_values is None:
        return config.model.dtype
    is_kept = weight.num_bytes is not None or not weight.num_values
    return config.model.quantization if is_kept else f"{config.model.quantization} as {config.model.dtype}"


def _num_values(weight: Weight) -> int:
    return math.prod(weight.shape) if weight.num_values is None else weight.num_values


def _gguf_types(files: ModelFiles, hf_config: dict[str, Any]) -> dict[str, str]:
    """The types of a file's tensors, by the names of what they hold."""
    architecture = gguf_architecture(files.gguf)
    return {
        name: tensor.type_name
        for tensor in files.gguf.tensors.values()
        for name, _ in architecture.pieces(tensor.name, tensor.shape, hf_config)
    }


def _bits_in_file(type_name: str, dtype: str) -> float:
    """Of a number. CPUs keep blocks of a GGUF file in as many."""
    num_values, num_bytes = BLOCK[type_name]
    return 8 * num_bytes / num_values


@cache
def _bits_on_gpus(type_name: str, dtype: str) -> float:
    """What a number of some type takes in the words that GPUs read: those of a weight are counted."""
    shape = 16, 2048
    raw = torch.zeros(int(math.prod(shape) * _bits_in_file(type_name, dtype) / 8), dtype=torch.uint8)
    form = Blocks(type_name, raw, shape, codec).decoded(torch.device("cpu"))
    packed = None if isinstance(form, Plain) else words.pack(form)
    if packed is None:
        return 8 * DTYPES[dtype].itemsize
    return 8 * sum(tensor.nbytes for tensor in packed.tensors()) / math.prod(shape)
