"""GPT-2: learned positions, not rotary ones; checkpoints hold weights transposed, and q, k and v as one tensor."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from quire.layers.config import DecoderConfig
from quire.layers.decoder import CausalLM, Decoder, PreNormLayer
from quire.layers.embedding import Embedding
from quire.layers.mlp import MLP
from quire.layers.norm import LayerNorm
from quire.layers.self_attention import SelfAttention
from quire.layers.weights import CheckpointTensor, transposed

ARCHITECTURES = ("GPT2LMHeadModel",)

TINY = {
    "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2",
    "n_embd": 64, "n_inner": 96, "n_layer": 3, "vocab_size": 256,
    "n_head": 4, "n_positions": 256, "layer_norm_epsilon": 1e-5,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    intermediate_size: int = 0  # 0: four times the hidden size
    max_position_embeddings: int = 1024
    activation_function: str = "gelu_new"
    layer_norm_epsilon: float = 1e-5
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False
    tie_word_embeddings: bool = True

    def scale(self, layer_idx: int) -> float:
        scale = self.head_size**-0.5 if self.scale_attn_weights else 1.0
        return scale / (layer_idx + 1) if self.scale_attn_by_inverse_layer_idx else scale


class PositionedDecoder(Decoder):
    embed_positions: Embedding  # set by the model

    def embed(self, token_ids_T: Tensor, positions_T: Tensor) -> Tensor:
        return super().embed(token_ids_T, positions_T) + self.embed_positions(positions_T)


class GPT2(CausalLM):
    model: PositionedDecoder
    decoder = PositionedDecoder
    renames = (
        ("transformer.h.", "model.layers."),
        ("transformer.wte.", "model.embed_tokens."),
        ("transformer.ln_f.", "model.norm."),
        ("transformer.wpe.", "model.embed_positions."),
        (".ln_1.", ".input_layernorm."),
        (".ln_2.", ".post_attention_layernorm."),
        (".attn.c_attn.", ".self_attn.qkv_proj."),
        (".attn.c_proj.", ".self_attn.o_proj."),
        (".mlp.c_fc.", ".mlp.up_proj."),
        (".mlp.c_proj.", ".mlp.down_proj."),
    )
    unused = (".attn.bias", ".attn.masked_bias")  # the causal mask

    def __init__(self, config: Config) -> None:
        norm = partial(LayerNorm, config.hidden_size, config.layer_norm_epsilon)
        mlp_size = config.intermediate_size or 4 * config.hidden_size
        layers = [
            PreNormLayer(
                SelfAttention(config, None, bias=True, out_bias=True, scale=config.scale(layer_idx), fused=True),
                MLP(config.hidden_size, mlp_size, act=config.activation_function),
                norm,
            )
            for layer_idx in range(config.num_hidden_layers)
        ]
        super().__init__(config, layers, norm())
        self.model.embed_positions = Embedding(config.max_position_embeddings, config.hidden_size, wide_ids=True)

    def translate(self, name: str, tensor: CheckpointTensor) -> Iterator[tuple[str, CheckpointTensor]]:
        if name.startswith(("h.", "wte.", "wpe.", "ln_f.")):
            name = f"transformer.{name}"  # the first checkpoints are of the decoder alone
        if name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight")):
            tensor = transposed(tensor)
        yield from super().translate(name, tensor)


MODEL = GPT2
