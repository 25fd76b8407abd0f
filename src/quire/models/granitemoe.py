"""Granite 3 with a mixture of experts and Granite's multipliers; checkpoints hold a layer's experts in two tensors."""

from dataclasses import dataclass
from functools import partial

from quire.layers.config import DecoderConfig
from quire.layers.decoder import CausalLM, PreNormLayer
from quire.layers.moe import MoE, Routing
from quire.layers.self_attention import SelfAttention

ARCHITECTURES = ("GraniteMoeForCausalLM",)

TINY = {
    "architectures": ["GraniteMoeForCausalLM"], "model_type": "granitemoe",
    "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 3, "vocab_size": 256,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "num_local_experts": 8, "num_experts_per_tok": 3,
    "max_position_embeddings": 256, "rope_theta": 10000.0,
    "tie_word_embeddings": True, "embedding_multiplier": 12.0, "attention_multiplier": 0.0625,
    "residual_multiplier": 0.22, "logits_scaling": 3.0,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    num_experts: int = 8
    num_experts_per_tok: int = 2
    embedding_multiplier: float = 1.0
    attention_multiplier: float = 1.0  # instead of 1 / sqrt(head size)
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0


class GraniteMoe(CausalLM):
    renames = (
        ("block_sparse_moe.", "mlp."),
        ("input_linear.weight", "experts.gate_up_proj"),
        ("output_linear.weight", "experts.down_proj"),
        ("router.layer.", "gate."),
        ("router.", "gate."),
    )

    def __init__(self, config: Config) -> None:
        rope, bias = config.rope(), config.attention_bias
        experts = partial(
            MoE,
            config.hidden_size,
            config.intermediate_size,
            config.num_experts,
            Routing(config.num_experts_per_tok, renormalize=True),
            activation=config.hidden_act,
            names=("gate_up_proj", "down_proj"),
        )
        layers = [
            PreNormLayer(
                SelfAttention(config, rope, bias=bias, out_bias=bias, scale=config.attention_multiplier),
                experts(),
                config.norm,
                config.residual_multiplier,
            )
            for _ in range(config.num_hidden_layers)
        ]
        super().__init__(
            config,
            layers,
            config.norm(),
            embed_scale=config.embedding_multiplier,
            logit_scale=1 / config.logits_scaling,
        )


MODEL = GraniteMoe
