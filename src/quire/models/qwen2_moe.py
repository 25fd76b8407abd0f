"""Qwen1.5 and Qwen2 with a mixture of experts: Qwen2's attention; next to the routed experts is a shared one, which a
gate weights for each token."""

from dataclasses import dataclass
from functools import partial

from torch import Tensor

from quire.layers.config import DecoderConfig
from quire.layers.decoder import CausalLM, PreNormLayer
from quire.layers.linear import Linear
from quire.layers.mlp import GatedMLP
from quire.layers.moe import MoE, Routing
from quire.layers.self_attention import SelfAttention

ARCHITECTURES = ("Qwen2MoeForCausalLM",)

TINY = {
    "architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe",
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "vocab_size": 256,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64,
    "mlp_only_layers": [1],
    "max_position_embeddings": 256, "rope_theta": 1000000.0, "use_sliding_window": True, "sliding_window": 24,
    "tie_word_embeddings": False,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    num_key_value_heads: int | None = 16
    max_position_embeddings: int = 32768
    sliding_window: int | None = 4096  # counts only where `use_sliding_window` says so
    use_sliding_window: bool = False
    max_window_layers: int = 28  # without layer_types: of so many layers, from the first, every other has the window
    qkv_bias: bool = True
    num_experts: int = 60
    num_experts_per_tok: int = 4
    moe_intermediate_size: int = 1408
    shared_expert_intermediate_size: int = 5632
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1  # every n-th layer has experts
    mlp_only_layers: list[int] | None = None

    def has_experts(self, layer_idx: int) -> bool:
        is_dense = layer_idx in (self.mlp_only_layers or ())
        return not is_dense and (layer_idx + 1) % self.decoder_sparse_step == 0

    def window(self, layer_idx: int) -> int | None:
        slides_by_index = layer_idx % 2 == 0 and layer_idx < self.max_window_layers
        slides = self.slides(layer_idx) if self.layer_types else slides_by_index
        return self.sliding_window if self.use_sliding_window and slides else None


class GatedShareMoE(MoE):
    """The output of its shared expert is multiplied by a gate."""

    shared_experts: GatedMLP

    def __init__(self, config: Config) -> None:
        super().__init__(
            config.hidden_size,
            config.moe_intermediate_size,
            config.num_experts,
            Routing(config.num_experts_per_tok, renormalize=config.norm_topk_prob),
            activation=config.hidden_act,
            shared=GatedMLP(config.hidden_size, config.shared_expert_intermediate_size, act=config.hidden_act),
        )
        self.shared_expert_gate = Linear(config.hidden_size, 1, split="nowhere")

    def shared(self, x_TD: Tensor) -> Tensor:
        return self.shared_expert_gate(x_TD).sigmoid() * self.shared_experts(x_TD)


class Qwen2Moe(CausalLM):
    renames = (("shared_expert.", "shared_experts."),)

    def __init__(self, config: Config) -> None:
        rope = config.rope()
        mlp = partial(GatedMLP, config.hidden_size, config.intermediate_size, act=config.hidden_act)
        layers = [
            PreNormLayer(
                SelfAttention(config, rope, bias=config.qkv_bias, window=config.window(layer_idx)),
                GatedShareMoE(config) if config.has_experts(layer_idx) else mlp(),
                config.norm,
            )
            for layer_idx in range(config.num_hidden_layers)
        ]
        super().__init__(config, layers, config.norm())


MODEL = Qwen2Moe
