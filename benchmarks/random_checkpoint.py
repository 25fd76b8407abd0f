"""A checkpoint with random weights in a published shape, for what must be read from files: `load_memory.py`.

The same numbers as `--load-format dummy`, in safetensors, or in a GGUF file where config.json says `"quant_method":
"gguf"` (of the architectures that GGUF names as in `GGUF_KEYS`).
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import torch
from torch import Tensor

from quire.checkpoint.find import find
from quire.checkpoint.hf_config import read_config
from quire.config import EngineConfig
from quire.frontend.model import ModelInfo
from quire.quant.base import RawTensor
from quire.worker.build import build
from quire.worker.dummy import dummy_tensors

GGUF_KEYS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "rope.freq_base": "rope_theta",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "vocab_size": "vocab_size",
}


def write(shape: Path, folder: Path, device: str = "cpu") -> Path:
    """`shape`: a folder with config.json. Returns what to load: `folder`, or a file in it."""
    config = json.loads((shape / "config.json").read_text())
    tensors = dict(drawn(shape, device))
    if config.get("quantization_config", {}).get("quant_method") == "gguf":
        return write_gguf(config, tensors, folder / "model.gguf")
    (folder / "config.json").write_text(json.dumps(config))
    write_safetensors(tensors, folder / "model.safetensors")
    return folder


def drawn(shape: Path, device: str) -> Iterator[tuple[str, RawTensor]]:
    options = {"model": str(shape), "load_format": "dummy", "device": device, "skip_tokenizer_init": True}
    config = ModelInfo.open(EngineConfig.from_kwargs(**options)).config
    model = build(config, read_config(find(str(shape))))
    for name, tensor in dummy_tensors(model, 0, torch.device(device)):
        yield name, tensor.read()


def bytes_of(raw: Tensor) -> Any:
    return raw.cpu().contiguous().numpy()


def write_safetensors(tensors: dict[str, RawTensor], path: Path) -> None:
    header, end = {}, 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.raw.numel()
        header[name] = {"dtype": tensor.type_name, "shape": tensor.shape, "data_offsets": (start, end)}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(bytes_of(tensor.raw))


def write_gguf(config: dict[str, Any], tensors: dict[str, RawTensor], path: Path) -> Path:
    writer = gguf.GGUFWriter(path, config["model_type"])
    for key, name in GGUF_KEYS.items():
        value = config[name]
        add = writer.add_float32 if isinstance(value, float) or "freq" in key else writer.add_uint32
        add(f"{config['model_type']}.{key}", value)
    architecture = gguf.MODEL_ARCH[config["model_type"].upper()]
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    for name, tensor in tensors.items():
        kind = gguf.GGMLQuantizationType[tensor.type_name]
        rows = bytes_of(tensor.raw).reshape(*tensor.shape[:-1], -1)
        writer.add_tensor(names.get_name(name, (".weight", ".bias")), rows, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
