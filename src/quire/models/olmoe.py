"""OLMoE: q and k are normed over all heads together, and may be clipped with v; experts in every layer, their weights left as they are."""

from dataclasses import dataclass

from torch import Tensor

from quire.layers.config import DecoderConfig
from quire.layers.decoder import CausalLM, PreNormLayer
from quire.layers.moe import MoE, Routing
from quire.layers.rope import Rope
from quire.layers.self_attention import JointNormAttention

ARCHITECTURES = ("OlmoeForCausalLM",)

TINY = {
    "architectures": ["OlmoeForCausalLM"], "model_type": "olmoe", "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 256, "rope_theta": 10000.0,
    "num_experts": 8, "num_experts_per_tok": 3, "clip_qkv": 1.0, "tie_word_embeddings": False,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-5
    clip_qkv: float | None = None  # q, k and v stay within it, on both sides of zero
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
        rope, routing = config.rope(), Routing(config.num_experts_per_tok, renormalize=config.norm_topk_prob)
        layers = [
            PreNormLayer(
                ClippedAttention(config, rope),
                MoE(
                    config.hidden_size,
                    config.intermediate_size,
                    config.num_experts,
                    routing,
                    activation=config.hidden_act,
                ),
                config.norm,
            )
            for _ in range(config.num_hidden_layers)
        ]
        super().__init__(config, layers, config.norm())


MODEL = Olmoe
