"""Falcon 7B, and the new architecture of 11B, 40B and 180B: attention and MLP are added together, and read one norm or
two; checkpoints hold q, k and v as one tensor, each KV head next to its queries."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from torch import nn

from quire.errors import UnsupportedModelError
from quire.layers.config import DecoderConfig
from quire.layers.decoder import CausalLM, ParallelLayer, PreNormLayer
from quire.layers.mlp import MLP
from quire.layers.norm import LayerNorm
from quire.layers.self_attention import SelfAttention
from quire.layers.weights import CheckpointTensor, order_q_k_v

ARCHITECTURES = ("FalconForCausalLM",)

TINY = {
    "architectures": ["FalconForCausalLM"], "model_type": "falcon",
    "hidden_size": 128, "ffn_hidden_size": 96, "num_hidden_layers": 3, "vocab_size": 256,
    "num_attention_heads": 4, "num_kv_heads": 2, "new_decoder_architecture": True,
    "max_position_embeddings": 256,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    intermediate_size: int = 0  # not used: configs give ffn_hidden_size instead
    ffn_hidden_size: int | None = None  # None: four times the hidden size
    activation: str = "gelu"
    layer_norm_epsilon: float = 1e-5
    bias: bool = False
    alibi: bool = False
    new_decoder_architecture: bool = False
    num_ln_in_parallel_attn: int | None = None  # in the new architecture; None: two
    # In the new architecture; None: one for each head. The base class has a number: so has the config once __init__ has
    # replaced None, which is transformers' default and so, as a test checks, ours.
    num_kv_heads: int | None = None  # type: ignore[assignment]
    multi_query: bool = True  # in the old architecture: all heads share one KV head
    parallel_attn: bool = True  # in the old architecture: attention and MLP are added together
    tie_word_embeddings: bool = True


class Falcon(CausalLM):
    renames = (
        ("transformer.h.", "model.layers."),
        ("transformer.word_embeddings.", "model.embed_tokens."),
        ("transformer.ln_f.", "model.norm."),
        (".self_attention.query_key_value.", ".self_attn.qkv_proj."),
        (".self_attention.dense.", ".self_attn.o_proj."),
        (".mlp.dense_h_to_4h.", ".mlp.up_proj."),
        (".mlp.dense_4h_to_h.", ".mlp.down_proj."),
        (".ln_attn.", ".input_layernorm."),
        (".ln_mlp.", ".mlp_layernorm."),
    )

    def __init__(self, config: Config) -> None:
        if config.alibi:
            raise UnsupportedModelError(
                "this Falcon knows positions by ALiBi, which is not supported: use one with rotary positions"
            )
        norm = partial(LayerNorm, config.hidden_size, config.layer_norm_epsilon)
        layer: Callable[..., nn.Module]
        if config.new_decoder_architecture:
            layer = ParallelLayer if config.num_ln_in_parallel_attn == 1 else partial(ParallelLayer, mlp_norm=norm)
            num_kv_heads = config.num_kv_heads or config.num_attention_heads
        else:
            layer = ParallelLayer if config.parallel_attn else PreNormLayer
            num_kv_heads = 1 if config.multi_query else config.num_attention_heads
        config = replace(config, num_kv_heads=num_kv_heads)
        rope, bias = config.rope(), config.bias
        mlp_size = config.ffn_hidden_size or 4 * config.hidden_size
        layers = [
            layer(
                SelfAttention(config, rope, bias=bias, out_bias=bias, fused=True),
                MLP(config.hidden_size, mlp_size, bias, config.activation),
                norm,
            )
            for _ in range(config.num_hidden_layers)
        ]
        super().__init__(config, layers, norm())

    def translate(self, name: str, tensor: CheckpointTensor) -> Iterator[tuple[str, CheckpointTensor]]:
        if ".query_key_value." in name:
            config = self.config
            tensor = order_q_k_v(name, tensor, config.num_attention_heads, config.num_kv_heads, config.head_size)
        yield from super().translate(name, tensor)


MODEL = Falcon
