"""ERNIE 4.5 with a mixture of experts in a range of layers: neighbouring elements rotate together; a bias takes part in
the choice of experts."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from torch import nn

from quire.layers.config import DecoderConfig
from quire.layers.decoder import CausalLM, PreNormLayer
from quire.layers.mlp import GatedMLP
from quire.layers.moe import MoE, Routing
from quire.layers.self_attention import SelfAttention
from quire.layers.weights import CheckpointTensor

ARCHITECTURES = ("Ernie4_5_MoeForCausalLM",)

TINY = {
    "architectures": ["Ernie4_5_MoeForCausalLM"], "model_type": "ernie4_5_moe",
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "vocab_size": 256,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 32, "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1, "moe_layer_end_index": 2,
    "max_position_embeddings": 256, "rope_theta": 500000.0,
    "tie_word_embeddings": True,
}  # fmt: skip

CORRECTION_BIAS = "moe_statics.e_score_correction_bias"


@dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    num_key_value_heads: int | None = 4
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    rope_theta: float = 500000.0
    tie_word_embeddings: bool = True
    use_bias: bool = False  # in every projection but the router's and the experts'
    moe_num_experts: int = 64
    moe_k: int = 6
    moe_intermediate_size: int = 1536
    moe_num_shared_experts: int = 2
    moe_layer_start_index: int = 1
    moe_layer_end_index: int = -1  # the last layer that may have experts; -1: the last of all
    moe_layer_interval: int = 1  # every n-th of these layers has experts

    def has_experts(self, layer_idx: int) -> bool:
        last = self.num_hidden_layers - 1 if self.moe_layer_end_index == -1 else self.moe_layer_end_index
        is_in_range = self.moe_layer_start_index <= layer_idx <= last
        return is_in_range and (layer_idx + 1) % self.moe_layer_interval == 0


class Ernie45Moe(CausalLM):
    def __init__(self, config: Config) -> None:
        rope, bias = config.rope(interleaved=True), config.use_bias
        routing = Routing(config.moe_k, renormalize=True)

        def mlp(size: int) -> GatedMLP:
            return GatedMLP(config.hidden_size, size, bias, config.hidden_act)

        def feed_forward(layer_idx: int) -> nn.Module:
            if not config.has_experts(layer_idx):
                return mlp(config.intermediate_size)
            shared_size = config.moe_intermediate_size * config.moe_num_shared_experts
            return MoE(
                config.hidden_size,
                config.moe_intermediate_size,
                config.moe_num_experts,
                routing,
                activation=config.hidden_act,
                correction_bias=CORRECTION_BIAS,
                shared=mlp(shared_size) if config.moe_num_shared_experts else None,
            )

        attention = partial(SelfAttention, config, rope, bias=bias, out_bias=bias)
        layers = [PreNormLayer(attention(), feed_forward(i), config.norm) for i in range(config.num_hidden_layers)]
        super().__init__(config, layers, config.norm(), head_bias=bias)

    def translate(self, name: str, tensor: CheckpointTensor) -> Iterator[tuple[str, CheckpointTensor]]:
        """Checkpoints hold the correction bias as a matrix of one row, and layers for further tokens, unused here."""
        if name.startswith("model.mtp_"):
            return
        if name.endswith(CORRECTION_BIAS) and tensor.shape[:-1] == (1,):
            tensor = replace(tensor, units=tensor.units[0])
        yield from super().translate(name, tensor)


MODEL = Ernie45Moe
