"""gpt-oss: attention sinks, a window in every other layer, biases everywhere, experts whose gate and up are clamped.
Checkpoints interleave the rows of an expert's gate and up, as MXFP4; or else hold them transposed."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from quire.errors import UnsupportedModelError
from quire.layers.config import DecoderConfig
from quire.layers.decoder import CausalLM, PreNormLayer
from quire.layers.moe import MoE, Routing
from quire.layers.self_attention import SelfAttention
from quire.layers.weights import CheckpointTensor, pick, transposed

ARCHITECTURES = ("GptOssForCausalLM",)

TINY = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss",
    "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 3, "vocab_size": 256,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "num_local_experts": 8, "num_experts_per_tok": 3,
    "max_position_embeddings": 256, "sliding_window": 24, "rope_theta": 150000.0,
    "rope_scaling": {
        "rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 64,
    },
}  # fmt: skip

YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


@dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    num_key_value_heads: int | None = 8
    head_dim: int = 64
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    rope_theta: float = 150000.0
    rope_scaling: dict[str, Any] | None = field(default_factory=lambda: YARN)
    sliding_window: int | None = 128
    sliding_window_pattern: int = 2
    attention_bias: bool = True
    num_experts: int = 128
    num_experts_per_tok: int = 4
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0


class GptOss(CausalLM):
    renames = ((".self_attn.sinks", ".self_attn.attn.sinks"), (".mlp.router.", ".mlp.gate."))

    def __init__(self, config: Config) -> None:
        if (config.swiglu_alpha, config.swiglu_limit) != (1.702, 7.0):
            raise UnsupportedModelError(
                "experts with a swiglu_alpha other than 1.702 or a swiglu_limit other than 7 are not supported"
            )
        rope, bias = config.rope(), config.attention_bias
        experts = partial(
            MoE,
            config.hidden_size,
            config.intermediate_size,
            config.num_experts,
            Routing(config.num_experts_per_tok, renormalize=True),
            activation="clamped_swiglu",
            bias=True,
            names=("gate_up_proj", "down_proj"),
        )
        layers = [
            PreNormLayer(
                SelfAttention(config, rope, bias=bias, out_bias=bias, window=config.window(layer_idx), sinks=True),
                experts(),
                config.norm,
            )
            for layer_idx in range(config.num_hidden_layers)
        ]
        super().__init__(config, layers, config.norm())

    def translate(self, name: str, tensor: CheckpointTensor) -> Iterator[tuple[str, CheckpointTensor]]:
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensor = transposed(tensor)
        if ".experts.gate_up_proj" in name and len(tensor.shape) > 1:
            tensor = _gates_first(tensor)
        yield from super().translate(name, tensor)


def _gates_first(tensor: CheckpointTensor) -> CheckpointTensor:
    """Reorders the rows of each expert, packed or not: all of gate, then all of up."""
    rows = range(tensor.shape[1])
    return pick(tensor, [*rows[::2], *rows[1::2]], dim=1)


MODEL = GptOss
