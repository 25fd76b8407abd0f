"""GLM-4.5 and later: part of each head rotates, q and k may be normed; experts are chosen by sigmoid scores plus a bias
that balances them."""

from dataclasses import dataclass
from functools import partial

from quire.layers.decoder import CausalLM, PreNormLayer
from quire.layers.moe import BalancedExpertsConfig
from quire.layers.self_attention import SelfAttention

ARCHITECTURES = ("Glm4MoeForCausalLM",)

TINY = {
    "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe",
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "vocab_size": 256,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "use_qk_norm": True,
    "moe_intermediate_size": 32, "first_k_dense_replace": 1, "n_routed_experts": 16, "num_experts_per_tok": 3,
    "n_shared_experts": 1, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5,
    "max_position_embeddings": 256, "rope_theta": 1000000.0, "partial_rotary_factor": 0.5,
    "attention_bias": True, "tie_word_embeddings": False, "num_nextn_predict_layers": 0,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Config(BalancedExpertsConfig):
    num_key_value_heads: int | None = 8
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    partial_rotary_factor: float = 0.5
    use_qk_norm: bool = False
    n_routed_experts: int = 128
    n_shared_experts: int = 1
    num_experts_per_tok: int = 8
    moe_intermediate_size: int = 1408
    first_k_dense_replace: int = 1
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0


class Glm4Moe(CausalLM):
    has_drafts = True

    def __init__(self, config: Config) -> None:
        rope = config.rope(config.partial_rotary_factor)
        attention = partial(SelfAttention, config, rope, bias=config.attention_bias, qk_norm=config.use_qk_norm)
        layers = [PreNormLayer(attention(), config.balanced(i), config.norm) for i in range(config.num_hidden_layers)]
        super().__init__(config, layers, config.norm())


MODEL = Glm4Moe
