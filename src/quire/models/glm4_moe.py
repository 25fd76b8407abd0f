"""GLM-4.5 and later: a part of each head rotates, q and k may be normed; experts chosen by sigmoid scores plus a bias that balances them."""

from dataclasses import dataclass
from functools import partial

from torch import nn

from quire.layers.config import DecoderConfig
from quire.layers.decoder import CausalLM, PreNormLayer
from quire.layers.mlp import GatedMLP
from quire.layers.moe import MoE, Routing
from quire.layers.norm import RMSNorm
from quire.layers.self_attention import SelfAttention

ARCHITECTURES = ("Glm4MoeForCausalLM",)

TINY = {
    "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "hidden_size": 64, "intermediate_size": 96,
    "moe_intermediate_size": 32, "num_hidden_layers": 3, "first_k_dense_replace": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "vocab_size": 256, "max_position_embeddings": 256, "rope_theta": 1000000.0, "partial_rotary_factor": 0.5,
    "attention_bias": True, "use_qk_norm": True, "n_routed_experts": 16, "num_experts_per_tok": 3, "n_shared_experts": 1, "n_group": 4,
    "topk_group": 2, "routed_scaling_factor": 2.5, "tie_word_embeddings": False, "num_nextn_predict_layers": 0,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    num_key_value_heads: int | None = 8
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    partial_rotary_factor: float = 0.5
    use_qk_norm: bool = False
    n_routed_experts: int = 128
    n_shared_experts: int = 1
    num_experts_per_tok: int = 8
    moe_intermediate_size: int = 1408
    first_k_dense_replace: int = 1  # so many layers have one MLP instead of experts
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0

    def routing(self) -> Routing:
        return Routing(
            self.num_experts_per_tok, "sigmoid", self.norm_topk_prob, self.routed_scaling_factor, self.n_group, self.topk_group,
            group_score_size=2,
        )  # fmt: skip


class Glm4Moe(CausalLM):
    has_drafts = True

    def __init__(self, config: Config) -> None:
        norm = partial(RMSNorm, config.hidden_size, config.rms_norm_eps)
        rope = config.rope(config.partial_rotary_factor)

        def mlp(size: int) -> GatedMLP:
            return GatedMLP(config.hidden_size, size, act=config.hidden_act)

        def feed_forward(layer_idx: int) -> nn.Module:
            if layer_idx < config.first_k_dense_replace:
                return mlp(config.intermediate_size)
            size = config.moe_intermediate_size
            return MoE(
                config.hidden_size, size, config.n_routed_experts, config.routing(), activation=config.hidden_act,
                correction_bias="gate.e_score_correction_bias", shared=mlp(size * config.n_shared_experts),
            )  # fmt: skip

        attention = partial(SelfAttention, config, rope, bias=config.attention_bias, qk_norm=config.use_qk_norm)
        layers = [PreNormLayer(attention(), feed_forward(i), norm) for i in range(config.num_hidden_layers)]
        super().__init__(config, layers, norm())


MODEL = Glm4Moe
