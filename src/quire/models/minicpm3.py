"""MiniCPM 3: Llama with latent attention, multipliers on embeddings and on what layers add, and a divisor of logits."""

import math
from dataclasses import dataclass

from quire.layers.decoder import CausalLM, PreNormLayer
from quire.layers.mla import MLA, MLAConfig
from quire.layers.mlp import GatedMLP

ARCHITECTURES = ("MiniCPM3ForCausalLM",)

TINY = {
    "architectures": ["MiniCPM3ForCausalLM"], "model_type": "minicpm3",
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "vocab_size": 256,
    "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 24,
    "max_position_embeddings": 256, "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "scale_emb": 1.5, "scale_depth": 4.0, "dim_model_base": 32,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Config(MLAConfig):
    q_lora_rank: int | None = 768
    kv_lora_rank: int = 256
    qk_nope_head_dim: int = 64
    qk_rope_head_dim: int = 32
    v_head_dim: int | None = None
    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-5
    mlp_bias: bool = False
    tie_word_embeddings: bool = True
    scale_emb: float = 12
    scale_depth: float | None = 1.4  # None: what layers add is not scaled
    dim_model_base: int | None = 256  # logits are divided by hidden_size / dim_model_base; None: they are not


class MiniCPM3(CausalLM):
    def __init__(self, config: Config) -> None:
        rope = config.rope()
        residual_scale = 1.0 if config.scale_depth is None else config.scale_depth / math.sqrt(config.num_hidden_layers)
        layers = [
            PreNormLayer(
                MLA(config, rope),
                GatedMLP(config.hidden_size, config.intermediate_size, config.mlp_bias, config.hidden_act),
                config.norm,
                residual_scale,
            )
            for _ in range(config.num_hidden_layers)
        ]
        logit_scale = (config.dim_model_base or config.hidden_size) / config.hidden_size
        super().__init__(config, layers, config.norm(), embed_scale=config.scale_emb, logit_scale=logit_scale)


MODEL = MiniCPM3
