"""What every case shares: sizes of a small Llama, its plain weights, and what a published checkpoint consists of."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

# Groups of 128 and blocks of 128x128 fit every projection.
SIZES = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16",
    "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2, "vocab_size": 256,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "max_position_embeddings": 256, "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip
# The last block of 128 is half empty: along the outputs of gate_proj and up_proj, along the inputs of down_proj.
PARTIAL = {**SIZES, "intermediate_size": 320}


@dataclass(frozen=True)
class Published:
    """A checkpoint as published, and what the library that defines its format reads from it."""

    config: dict[str, Any]  # config.json
    tensors: dict[str, Tensor]  # model.safetensors
    values: dict[str, Tensor]  # path of a quantized linear -> its weight [outputs, inputs] in float32
    files: dict[str, Any] = field(default_factory=dict)  # other JSON files
    # path -> what the library's layer makes of inputs in float32, where this is more than their product with the value.
    layers: dict[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)

    def outputs(self, path: str, x: Tensor) -> Tensor:
        """What the library computes: it may round inputs."""
        return self.layers[path](x) if path in self.layers else x @ self.values[path].T

    def plain(self) -> dict[str, Tensor]:
        """The same model without quantization: every weight in float32 by its usual name."""
        kept = {name: tensor.float() for name, tensor in self.tensors.items() if not self.owner(name)}
        return kept | {f"{path}.weight": weight for path, weight in self.values.items()}

    def owner(self, name: str) -> str | None:
        """The path of the quantized linear that a tensor belongs to."""
        return next((path for path in self.values if name.startswith(f"{path}.")), None)


def write(published: Published, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in {"config.json": published.config, **published.files}.items():
        (folder / name).write_text(json.dumps(content, indent=2))
    # A tensor that is a view of another would be refused, or take its whole memory along.
    save_file({name: t.contiguous().clone() for name, t in published.tensors.items()}, folder / "model.safetensors")
    return folder


def weights(sizes: Mapping[str, Any] = SIZES, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """A plain checkpoint with random weights. Norms are near one."""
    generator = torch.Generator().manual_seed(seed)
    hidden, inner = sizes["hidden_size"], sizes["intermediate_size"]
    queries, keys = (sizes[name] * sizes["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    layer = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    layers = range(sizes["num_hidden_layers"])
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (sizes["vocab_size"], hidden)}
    shapes |= {f"model.layers.{i}.{name}": shape for i in layers for name, shape in layer.items()}
    shapes |= {"model.norm": (hidden,), "lm_head": (sizes["vocab_size"], hidden)}
    found = {}
    for path, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        found[f"{path}.weight"] = (1 + 0.1 * noise if len(shape) == 1 else 0.08 * noise).to(dtype)
    return found


def linears(tensors: Mapping[str, Tensor]) -> list[str]:
    """Paths of the projections in the layers, which is what quantizers quantize unless told otherwise."""
    return [name.removesuffix(".weight") for name in tensors if name.endswith("_proj.weight")]
