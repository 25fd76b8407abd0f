"""Falcon 7B, and the new architecture of 11B, 40B and 180B: attention and MLP side by side, behind one norm or two; checkpoints hold
q, k and v as one, each KV head beside its queries."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from quire.errors import UnsupportedModelError
from quire.layers.config import DecoderConfig
from quire.layers.decoder import CausalLM, ParallelLayer, PreNormLayer
from quire.layers.mlp import MLP
from quire.layers.norm import LayerNorm
from quire.layers.self_attention import SelfAttention
from quire.layers.weights import RawTensor, pick_rows, q_k_v_rows

ARCHITECTURES = ("FalconForCausalLM",)

TINY = {
    "architectures": ["FalconForCausalLM"], "model_type": "falcon", "hidden_size": 128, "ffn_hidden_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_kv_heads": 2, "vocab_size": 256, "max_position_embeddings": 256, "new_decoder_architecture": True,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    intermediate_size: int | None = None  # never given: here it is
    ffn_hidden_size: int | None = None  # None: four times the hidden size
    activation: str = "gelu"
    layer_norm_epsilon: float = 1e-5
    bias: bool = False
    alibi: bool = False
    new_decoder_architecture: bool = False
    num_ln_in_parallel_attn: int | None = None  # in the new architecture; None: two
    num_kv_heads: int | None = None  # in the new architecture; None: one for each head
    multi_query: bool = True  # in the old one: all heads share a KV head
    parallel_attn: bool = True  # in the old one
    tie_word_embeddings: bool = True


class Falcon(CausalLM):
    renames = (
        ("transformer.h.", "model.layers."), ("transformer.word_embeddings.", "model.embed_tokens."), ("transformer.ln_f.", "model.norm."),
        (".self_attention.query_key_value.", ".self_attn.qkv_proj."), (".self_attention.dense.", ".self_attn.o_proj."),
        (".mlp.dense_h_to_4h.", ".mlp.up_proj."), (".mlp.dense_4h_to_h.", ".mlp.down_proj."),
        (".ln_attn.", ".input_layernorm."), (".ln_mlp.", ".mlp_layernorm."),
    )  # fmt: skip

    def __init__(self, config: Config) -> None:
        if config.alibi:
            raise UnsupportedModelError(
                "this Falcon knows positions by ALiBi, which is not supported: use one with rotary positions"
            )
        norm = partial(LayerNorm, config.hidden_size, config.layer_norm_epsilon)
        if config.new_decoder_architecture:
            layer = ParallelLayer if config.num_ln_in_parallel_attn == 1 else partial(ParallelLayer, mlp_norm=norm)
            num_kv_heads = config.num_kv_heads or config.num_attention_heads
        else:
            layer = ParallelLayer if config.parallel_attn else PreNormLayer
            num_kv_heads = 1 if config.multi_query else config.num_attention_heads
        config, rope = replace(config, num_kv_heads=num_kv_heads), config.rope()
        layers = [
            layer(
                SelfAttention(config, rope, bias=config.bias, out_bias=config.bias, fused=True),
                MLP(
                    config.hidden_size, config.ffn_hidden_size or 4 * config.hidden_size, config.bias, config.activation
                ),
                norm,
            )
            for _ in range(config.num_hidden_layers)
        ]
        super().__init__(config, layers, norm())

    def translate(self, name: str, tensor: RawTensor) -> Iterator[tuple[str, RawTensor]]:
        if ".query_key_value." in name:
            tensor = pick_rows(
                tensor, q_k_v_rows(self.config.num_attention_heads, self.config.num_kv_heads, self.config.head_size)
            )
        yield from super().translate(name, tensor)


MODEL = Falcon
