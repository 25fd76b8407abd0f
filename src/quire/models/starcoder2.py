"""StarCoder2: LayerNorm, a plain MLP, biases everywhere, and a window in all layers."""

from dataclasses import dataclass
from functools import partial

from quire.layers.config import DecoderConfig
from quire.layers.decoder import CausalLM, PreNormLayer
from quire.layers.mlp import MLP
from quire.layers.norm import LayerNorm
from quire.layers.self_attention import SelfAttention

ARCHITECTURES = ("Starcoder2ForCausalLM",)

TINY = {
    "architectures": ["Starcoder2ForCausalLM"], "model_type": "starcoder2",
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "vocab_size": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 256, "rope_theta": 100000.0, "sliding_window": 24,
    "norm_epsilon": 1e-5, "use_bias": True, "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    max_position_embeddings: int = 4096
    norm_epsilon: float = 1e-5
    hidden_act: str = "gelu_pytorch_tanh"
    use_bias: bool = True
    tie_word_embeddings: bool = True


class Starcoder2(CausalLM):
    renames = ((".c_fc.", ".up_proj."), (".c_proj.", ".down_proj."))

    def __init__(self, config: Config) -> None:
        norm = partial(LayerNorm, config.hidden_size, config.norm_epsilon)
        rope, bias = config.rope(), config.use_bias
        layers = [
            PreNormLayer(
                SelfAttention(config, rope, bias=bias, out_bias=bias, window=config.sliding_window),
                MLP(config.hidden_size, config.intermediate_size, bias, config.hidden_act),
                norm,
            )
            for _ in range(config.num_hidden_layers)
        ]
        super().__init__(config, layers, norm())


MODEL = Starcoder2
