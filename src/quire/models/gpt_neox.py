"""GPT-NeoX, Pythia and others of that shape: attention and MLP are added together, each reads a norm of its own; part
of a head rotates; checkpoints hold q, k and v as one tensor, head by head."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from torch import nn

from quire.layers.config import DecoderConfig
from quire.layers.decoder import CausalLM, ParallelLayer, PreNormLayer
from quire.layers.mlp import MLP
from quire.layers.norm import LayerNorm
from quire.layers.rope import Rope
from quire.layers.self_attention import SelfAttention
from quire.layers.weights import CheckpointTensor, order_q_k_v

ARCHITECTURES = ("GPTNeoXForCausalLM",)

TINY = {
    "architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox",
    "hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 3, "vocab_size": 256,
    "num_attention_heads": 4,
    "max_position_embeddings": 256, "rotary_pct": 0.25,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    hidden_act: str = "gelu"
    attention_bias: bool = True
    layer_norm_eps: float = 1e-5
    use_parallel_residual: bool = True
    rope_theta: float = 0.0  # 0: as rotary_emb_base
    partial_rotary_factor: float | None = None  # None: as rotary_pct
    # The names of these two in older configs.
    rotary_emb_base: float = 10000.0
    rotary_pct: float = 0.25


class GPTNeoX(CausalLM):
    renames: tuple[tuple[str, str], ...] = (
        ("gpt_neox.embed_in.", "model.embed_tokens."),
        ("gpt_neox.final_layer_norm.", "model.norm."),
        ("gpt_neox.", "model."),
        ("embed_out.", "lm_head."),
        (".attention.query_key_value.", ".self_attn.qkv_proj."),
        (".attention.dense.", ".self_attn.o_proj."),
        (".mlp.dense_h_to_4h.", ".mlp.up_proj."),
        (".mlp.dense_4h_to_h.", ".mlp.down_proj."),
    )
    unused = (".attention.bias", ".attention.masked_bias")  # the causal mask

    def __init__(self, config: Config) -> None:
        norm = partial(LayerNorm, config.hidden_size, config.layer_norm_eps)
        layer: Callable[..., nn.Module] = PreNormLayer
        if config.use_parallel_residual:
            layer = partial(ParallelLayer, mlp_norm=norm)
            self.renames = (*self.renames, (".post_attention_layernorm.", ".mlp_layernorm."))
        rotary_dim = int(config.head_size * (config.partial_rotary_factor or config.rotary_pct))
        theta = config.rope_theta or config.rotary_emb_base
        rope = Rope(rotary_dim, theta, config.rope_scaling, config.max_position_embeddings)
        layers = [
            layer(
                SelfAttention(config, rope, bias=config.attention_bias, out_bias=config.attention_bias, fused=True),
                MLP(config.hidden_size, config.intermediate_size, act=config.hidden_act),
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


MODEL = GPTNeoX
