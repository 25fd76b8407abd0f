"""Qwen3 with a mixture of experts: Qwen3's attention, and in most layers routed experts instead of one MLP."""

from dataclasses import dataclass, field
from functools import partial

from quire.layers.config import DecoderConfig
from quire.layers.decoder import CausalLM, PreNormLayer
from quire.layers.mlp import GatedMLP
from quire.layers.moe import MoE, Routing
from quire.layers.self_attention import SelfAttention

ARCHITECTURES = ("Qwen3MoeForCausalLM",)

TINY = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe",
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "vocab_size": 256,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "norm_topk_prob": True,
    "mlp_only_layers": [1],
    "max_position_embeddings": 256, "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    num_key_value_heads: int | None = 4
    max_position_embeddings: int = 32768
    sliding_window: int | None = 4096  # counts only where `use_sliding_window` says so
    use_sliding_window: bool = False
    num_experts: int = 128
    num_experts_per_tok: int = 8
    moe_intermediate_size: int = 768
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1  # every n-th layer has experts
    mlp_only_layers: list[int] | None = field(default_factory=list)

    def has_experts(self, layer_idx: int) -> bool:
        is_dense = layer_idx in (self.mlp_only_layers or ())
        return not is_dense and (layer_idx + 1) % self.decoder_sparse_step == 0


class Qwen3Moe(CausalLM):
    def __init__(self, config: Config) -> None:
        rope, bias = config.rope(), config.attention_bias
        window = config.sliding_window if config.use_sliding_window else None
        mlp = partial(GatedMLP, config.hidden_size, config.intermediate_size, act=config.hidden_act)
        experts = partial(
            MoE,
            config.hidden_size,
            config.moe_intermediate_size,
            config.num_experts,
            Routing(config.num_experts_per_tok, renormalize=config.norm_topk_prob),
            activation=config.hidden_act,
        )
        layers = [
            PreNormLayer(
                SelfAttention(config, rope, bias=bias, out_bias=bias, qk_norm=True, window=window),
                experts() if config.has_experts(layer_idx) else mlp(),
                config.norm,
            )
            for layer_idx in range(config.num_hidden_layers)
        ]
        super().__init__(config, layers, config.norm())


MODEL = Qwen3Moe
