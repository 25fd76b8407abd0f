"""OLMoE: q and k are normed over all heads together, and may be clipped with v; every layer has experts, whose weights
are not normalized unless the config says so."""

from dataclasses import dataclass
from functools import partial

from torch import Tensor

from quire.layers.config import DecoderConfig
from quire.layers.decoder import CausalLM, PreNormLayer
from quire.layers.moe import MoE, Routing
from quire.layers.rope import Rope
from quire.layers.self_attention import JointNormAttention

ARCHITECTURES = ("OlmoeForCausalLM",)

TINY = {
    "architectures": ["OlmoeForCausalLM"], "model_type": "olmoe",
    "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 3, "vocab_size": 256,
    "num_attention_heads": 4, "num_key_value_heads": 2, "clip_qkv": 1.0,
    "num_experts": 8, "num_experts_per_tok": 3,
    "max_position_embeddings": 256, "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-5
    clip_qkv: float | None = None  # q, k and v are clamped to [-clip_qkv, clip_qkv]
    num_experts: int = 64
    num_experts_per_tok: int = 8
    norm_topk_prob: bool = False


class ClippedAttention(JointNormAttention):
    def __init__(self, config: Config, rope: Rope) -> None:
        super().__init__(config, rope, bias=config.attention_bias, out_bias=config.attention_bias)
        self.limit = config.clip_qkv

    def qkv(self, x_TD: Tensor) -> Tensor:
        qkv_TX = super().qkv(x_TD)
        return qkv_TX if self.limit is None else qkv_TX.clamp(-self.limit, self.limit)


class Olmoe(CausalLM):
    def __init__(self, config: Config) -> None:
        rope = config.rope()
        experts = partial(
            MoE,
            config.hidden_size,
            config.intermediate_size,
            config.num_experts,
            Routing(config.num_experts_per_tok, renormalize=config.norm_topk_prob),
            activation=config.hidden_act,
        )
        layers = [
            PreNormLayer(ClippedAttention(config, rope), experts(), config.norm)
            for _ in range(config.num_hidden_layers)
        ]
        super().__init__(config, layers, config.norm())


MODEL = Olmoe
