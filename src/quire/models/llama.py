"""Llama 2 and 3, Mistral, SmolLM and the many models of the same shape."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from quire.layers.attention import Attention, StepContext
from quire.layers.embedding import Embedding
from quire.layers.linear import Linear, LMHead
from quire.layers.mlp import GatedMLP
from quire.layers.norm import RMSNorm
from quire.layers.rope import Rope

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM")

TINY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 256, "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
}  # fmt: skip

# checkpoint name -> (module here, shard of it)
SHARDS = {
    "q_proj": ("qkv_proj", 0), "k_proj": ("qkv_proj", 1), "v_proj": ("qkv_proj", 2),
    "gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1),
}  # fmt: skip


@dataclass(frozen=True)
class Config:
    """The fields of config.json this family reads, with Hugging Face's defaults."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    vocab_size: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    sliding_window: int | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False


class LlamaAttention(nn.Module):
    def __init__(self, config: Config, rope: Rope) -> None:
        super().__init__()
        num_heads, num_kv_heads = config.num_attention_heads, config.num_key_value_heads or config.num_attention_heads
        head_size, bias = rope.rotary_dim, config.attention_bias
        q_size, kv_size = num_heads * head_size, num_kv_heads * head_size
        self.qkv_proj = Linear(config.hidden_size, q_size, kv_size, kv_size, bias=bias)
        self.o_proj = Linear(q_size, config.hidden_size, bias=bias)
        self.attn = Attention(num_heads, num_kv_heads, head_size, rope, window=config.sliding_window)

    def forward(self, x_TD: Tensor, positions_T: Tensor) -> Tensor:
        return self.o_proj(self.attn(self.qkv_proj(x_TD), positions_T))


class LlamaLayer(nn.Module):
    def __init__(self, config: Config, rope: Rope) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = LlamaAttention(config, rope)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, config.mlp_bias)

    def forward(
        self, x_TD: Tensor, residual_TD: Tensor | None, positions_T: Tensor, context: StepContext | None = None
    ) -> tuple[Tensor, Tensor]:
        """The last layer is given the step's `context`: behind its attention only the tokens that are wanted go on."""
        x_TD, residual_TD = self.input_layernorm(x_TD, residual_TD)
        x_TD = self.self_attn(x_TD, positions_T)
        if context is not None:
            x_TD, residual_TD = context.only_wanted(x_TD), context.only_wanted(residual_TD)
        x_TD, residual_TD = self.post_attention_layernorm(x_TD, residual_TD)
        return self.mlp(x_TD), residual_TD


class LlamaModel(nn.Module):
    context = StepContext()  # attached by worker/build.py

    def __init__(self, config: Config) -> None:
        super().__init__()
        head_dim = config.head_dim or config.hidden_size // config.num_attention_heads
        rope = Rope(head_dim, config.rope_theta, config.rope_scaling, config.max_position_embeddings)
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(LlamaLayer(config, rope) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, token_ids_T: Tensor, positions_T: Tensor) -> Tensor:
        x_TD, residual_TD = self.embed_tokens(token_ids_T), None
        *layers, last = self.layers
        for layer in layers:
            x_TD, residual_TD = layer(x_TD, residual_TD, positions_T)
        x_TD, residual_TD = last(x_TD, residual_TD, positions_T, self.context)
        return self.norm(x_TD, residual_TD)[0]


class LlamaForCausalLM(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.model = LlamaModel(config)
        self.lm_head = LMHead(config.hidden_size, config.vocab_size)
        self.tied = {"lm_head.weight": "model.embed_tokens.weight"} if config.tie_word_embeddings else {}

    def forward(self, token_ids_T: Tensor, positions_T: Tensor) -> Tensor:
        """Final hidden states of the tokens the step's context wants; the runner asks `logits` for the rows it needs."""
        return self.model(token_ids_T, positions_T)

    def logits(self, hidden_RD: Tensor) -> Tensor:
        return self.lm_head(hidden_RD)


MODEL = LlamaForCausalLM
