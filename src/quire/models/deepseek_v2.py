"""DeepSeek V2, V2-Lite and their Coder and Chat models: latent attention, and experts chosen from the best groups."""

from dataclasses import dataclass
from functools import partial

from quire.errors import UnsupportedModelError
from quire.layers.decoder import CausalLM, PreNormLayer
from quire.layers.mla import MLA, MLAConfig
from quire.layers.moe import Routing, SharedExpertsConfig

ARCHITECTURES = ("DeepseekV2ForCausalLM",)

TINY = {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2",
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "vocab_size": 256,
    "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": None, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 24,
    "moe_intermediate_size": 32, "first_k_dense_replace": 1, "n_routed_experts": 16, "num_experts_per_tok": 3,
    "n_shared_experts": 2, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2,
    "routed_scaling_factor": 4.0,
    "max_position_embeddings": 256,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 0.9,
        "original_max_position_embeddings": 64,
    },
    "tie_word_embeddings": False,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Config(SharedExpertsConfig, MLAConfig):
    n_routed_experts: int = 64
    n_shared_experts: int = 2
    moe_intermediate_size: int = 1407
    first_k_dense_replace: int = 0
    topk_method: str = "greedy"
    n_group: int | None = None
    topk_group: int | None = None
    routed_scaling_factor: float = 1.0
    mlp_bias: bool = False

    def routing(self) -> Routing:
        greedy = Routing(self.num_experts_per_tok, scale=self.routed_scaling_factor)
        group_limited = Routing(
            self.num_experts_per_tok,
            scale=self.routed_scaling_factor,
            num_groups=self.n_group or 1,
            num_groups_kept=self.topk_group or 1,
        )
        known = {"greedy": greedy, "group_limited_greedy": group_limited}
        if self.topk_method not in known:
            supported = ", ".join(known)
            raise UnsupportedModelError(f"topk_method {self.topk_method!r:.40} is not supported: {supported} are")
        return known[self.topk_method]


class DeepseekV2(CausalLM):
    def __init__(self, config: Config) -> None:
        rope = config.rope(interleaved=True)
        feed_forward = partial(config.feed_forward, routing=config.routing(), bias=config.mlp_bias)
        layers = [
            PreNormLayer(MLA(config, rope), feed_forward(i), config.norm) for i in range(config.num_hidden_layers)
        ]
        super().__init__(config, layers, config.norm())


MODEL = DeepseekV2
