"""DeepSeek V3, R1 and models of the same shape: latent attention; experts are chosen by sigmoid scores plus a bias that
balances them."""

from dataclasses import dataclass

from quire.layers.decoder import CausalLM, PreNormLayer
from quire.layers.mla import MLA, MLAConfig
from quire.layers.moe import BalancedExpertsConfig

ARCHITECTURES = ("DeepseekV3ForCausalLM",)

TINY = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3",
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "vocab_size": 256,
    "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 24,
    "moe_intermediate_size": 32, "first_k_dense_replace": 1, "n_routed_experts": 16, "num_experts_per_tok": 3,
    "n_shared_experts": 1, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5,
    "max_position_embeddings": 256,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 64,
    },
    "tie_word_embeddings": False, "num_nextn_predict_layers": 0,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Config(BalancedExpertsConfig, MLAConfig):
    max_position_embeddings: int = 4096
    n_routed_experts: int = 256
    n_shared_experts: int = 1
    num_experts_per_tok: int = 8
    moe_intermediate_size: int = 2048
    first_k_dense_replace: int = 3
    n_group: int = 8
    topk_group: int = 4
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 2.5
    rope_interleave: bool = True


class DeepseekV3(CausalLM):
    has_drafts = True

    def __init__(self, config: Config) -> None:
        rope = config.rope(interleaved=config.rope_interleave)
        layers = [
            PreNormLayer(MLA(config, rope), config.balanced(i), config.norm) for i in range(config.num_hidden_layers)
        ]
        super().__init__(config, layers, config.norm())


MODEL = DeepseekV3
