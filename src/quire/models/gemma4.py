"""Gemma 4, text: the last layers read the cache of the last layer of their type that has its own; layers that see the
whole context have larger heads; values are normed; every layer gets a small vector of its own for each token; some
models have experts next to the MLP. So attention, feed-forward and the frame are all written here."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from quire.errors import UnsupportedModelError
from quire.layers.activation import activation
from quire.layers.attention import Attention, StepContext
from quire.layers.base import Layer, frozen, head_sections
from quire.layers.config import DecoderConfig
from quire.layers.decoder import CausalLM, Decoder, Elsewhere, select_outputs
from quire.layers.embedding import Embedding
from quire.layers.linear import Linear
from quire.layers.mlp import GatedMLP
from quire.layers.moe import Experts, Routing
from quire.layers.norm import RMSNorm
from quire.layers.rope import Rope

ARCHITECTURES = ("Gemma4ForCausalLM",)

TINY = {
    "architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text",
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6, "vocab_size": 256,
    "vocab_size_per_layer_input": 256, "hidden_size_per_layer_input": 32,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 32,
    "num_kv_shared_layers": 3,
    "max_position_embeddings": 256, "sliding_window": 24,
    "layer_types": [
        "sliding_attention", "sliding_attention", "full_attention",
        "sliding_attention", "sliding_attention", "full_attention",
    ],
    "use_double_wide_mlp": True, "final_logit_softcapping": 8.0,
}  # fmt: skip

ROPES: dict[str, dict[str, Any]] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}


@dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    num_key_value_heads: int | None = 4
    head_dim: int = 256
    # Of layers that see the whole context.
    global_head_dim: int = 512
    num_global_key_value_heads: int | None = None
    per_layer_config: dict[str, dict[str, Any]] | None = None  # how later files say the same: layer -> sizes
    max_position_embeddings: int = 131_072
    sliding_window: int = 512
    sliding_window_pattern: int = 6
    hidden_activation: str = "gelu_pytorch_tanh"
    tie_word_embeddings: bool = True
    final_logit_softcapping: float | None = None
    use_bidirectional_attention: str | None = None
    vocab_size_per_layer_input: int = 262_144
    hidden_size_per_layer_input: int = 256  # 0: layers have no inputs of their own
    attention_k_eq_v: bool = False  # in layers that see the whole context
    num_kv_shared_layers: int = 0  # so many layers, the last ones, read another layer's cache
    use_double_wide_mlp: bool = False  # in those layers
    enable_moe_block: bool = False
    num_experts: int | None = None
    top_k_experts: int | None = None
    moe_intermediate_size: int | None = None

    def of_layer(self, layer_idx: int) -> "Config":
        """This config with the sizes of the layer's heads."""
        if self.per_layer_config is not None:
            sizes = self.per_layer_config.get(str(layer_idx), {})
        elif self.slides(layer_idx):
            sizes = {}
        else:
            num_kv_heads = self.num_global_key_value_heads if self.attention_k_eq_v else None
            sizes = {"head_dim": self.global_head_dim, "num_key_value_heads": num_kv_heads or self.num_key_value_heads}
        changes = {key: sizes[key] for key in ("head_dim", "num_key_value_heads") if key in sizes}
        return dataclasses.replace(self, **changes)

    def owner(self, layer_idx: int) -> int | None:
        """The layer whose cache this one reads; None: it has its own."""
        num_owners = self.num_hidden_layers - self.num_kv_shared_layers
        if layer_idx < num_owners:
            return None
        alike = [i for i in range(num_owners) if self.layer_type(i) == self.layer_type(layer_idx)]
        if not alike:
            raise UnsupportedModelError(
                f"no layer before {num_owners} has a cache of the type that layer {layer_idx} is to share"
            )
        return alike[-1]

    def expert_sizes(self) -> tuple[int, int, int]:
        """(experts, experts of a token, width of an expert), where there are experts."""
        given = self.num_experts, self.top_k_experts, self.moe_intermediate_size
        sizes = [size for size in given if size is not None]
        if len(sizes) < len(given):
            raise UnsupportedModelError(
                "the model's config.json does not give the sizes of its experts: it is incomplete"
            )
        num_experts, num_chosen, width = sizes
        return num_experts, num_chosen, width


class Gemma4Attention(nn.Module):
    """Norms each head of q, k and v. Values may be the keys before they are normed. A layer that reads another layer's
    cache has neither keys nor values."""

    def __init__(self, config: Config, layer_idx: int, rope: Rope) -> None:
        super().__init__()
        sizes = config.of_layer(layer_idx)
        owner = config.owner(layer_idx)
        bias = config.attention_bias
        num_heads, num_kv_heads, head_size = config.num_attention_heads, sizes.num_kv_heads, sizes.head_size
        q, kv = head_sections(num_heads, num_kv_heads, head_size)
        parts = ["q_proj"]
        if owner is None:
            parts.append("k_proj")
            if config.slides(layer_idx) or not config.attention_k_eq_v:
                parts.append("v_proj")
        num_kv = len(parts) - 1  # how many of k and v are projected
        self.qkv_proj = Linear(
            config.hidden_size,
            q.size,
            *[kv.size] * num_kv,
            bias=bias,
            parts=parts,
            sections=[q, *[kv] * num_kv],
        )
        self.o_proj = Linear(q.size, config.hidden_size, bias=bias, split="inputs", sections=(q,))
        self.q_norm = RMSNorm(head_size, config.rms_norm_eps)
        self.k_norm = RMSNorm(head_size, config.rms_norm_eps) if owner is None else None
        self.attn = Attention(
            num_heads,
            num_kv_heads,
            head_size,
            rope,
            scale=1.0,
            window=config.window(layer_idx),
            shares=None if owner is None else f"model.layers.{owner}.self_attn.attn",
        )

    def forward(self, x_TD: Tensor, positions_T: Tensor) -> Tensor:
        qkv_TX = self.qkv_proj(x_TD)
        if self.k_norm is not None:
            q_size, head_size = self.o_proj.in_features, self.attn.head_size
            kv_size = self.attn.num_kv_heads * head_size
            v_TKH = qkv_TX[:, -kv_size:].unflatten(1, (-1, head_size))
            v_TX = functional.rms_norm(v_TKH, (head_size,), eps=self.k_norm.eps).flatten(1)
            qkv_TX = torch.cat((qkv_TX[:, : q_size + kv_size], v_TX), 1)
        return self.o_proj(self.attn(qkv_TX, positions_T, self.q_norm, self.k_norm))


class Gemma4Router(Layer):
    """Reads the residual stream through a norm of its own; experts' weights are multiplied by a factor per expert."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        num_experts, num_chosen, _ = config.expert_sizes()
        self.norm = config.norm()
        self.proj = Linear(config.hidden_size, num_experts, split="nowhere")
        self.per_expert_scale = frozen(torch.empty(num_experts))
        self.routing = Routing(num_chosen, renormalize=True)
        self.logit_scale = config.hidden_size**-0.5

    def forward(self, stream_TD: Tensor, experts: Experts) -> tuple[Tensor, Tensor]:
        logits_TE = self.proj(self.norm(stream_TD)[0]) * self.logit_scale
        weights_TK, expert_ids_TK = experts.backend.route(logits_TE, self.routing)
        return weights_TK * self.per_expert_scale[expert_ids_TK.long()].float(), expert_ids_TK


class Gemma4Layer(Layer):
    """Norms before and after attention and feed-forward, as SandwichLayer; then the layer's own input is added."""

    def __init__(self, config: Config, layer_idx: int, rope: Rope) -> None:
        super().__init__()
        is_wide = config.use_double_wide_mlp and config.owner(layer_idx) is not None
        mlp_size = config.intermediate_size * (2 if is_wide else 1)
        self.input_layernorm = config.norm()
        self.self_attn = Gemma4Attention(config, layer_idx, rope)
        self.post_attention_layernorm = config.norm()
        self.pre_feedforward_layernorm = config.norm()
        self.mlp = GatedMLP(config.hidden_size, mlp_size, act=config.hidden_activation)
        self.post_feedforward_layernorm = config.norm()
        self.router = None
        if config.enable_moe_block:
            num_experts, _, width = config.expert_sizes()
            self.router = Gemma4Router(config)
            self.experts = Experts(
                num_experts,
                config.hidden_size,
                width,
                config.hidden_activation,
                bias=False,
                names=("gate_up_proj", "down_proj"),
            )
            self.post_feedforward_layernorm_1 = config.norm()
            self.post_feedforward_layernorm_2 = config.norm()
            self.pre_feedforward_layernorm_2 = config.norm()
        input_size = config.hidden_size_per_layer_input
        if input_size:
            self.per_layer_input_gate = Linear(config.hidden_size, input_size, split="nowhere")
            self.per_layer_projection = Linear(input_size, config.hidden_size, split="nowhere")
            self.post_per_layer_input_norm = config.norm()
        self.act = activation(config.hidden_activation)
        self.layer_scalar = frozen(torch.empty(1))

    def forward(
        self, stream_TD: Tensor, input_TP: Tensor | None, positions_T: Tensor, context: StepContext | None = None
    ) -> Tensor:
        x_TD = self.self_attn(self.input_layernorm(stream_TD)[0], positions_T)
        x_TD, stream_TD = select_outputs(context, x_TD, stream_TD)
        x_TD, stream_TD = self.pre_feedforward_layernorm(self.post_attention_layernorm(x_TD)[0], stream_TD)
        x_TD = self.mlp(x_TD)
        if self.router is not None:
            weights_TK, expert_ids_TK = self.router(stream_TD, self.experts)
            routed_TD = self.experts(self.pre_feedforward_layernorm_2(stream_TD)[0], weights_TK, expert_ids_TK)
            x_TD = self.post_feedforward_layernorm_1(x_TD)[0] + self.post_feedforward_layernorm_2(routed_TD)[0]
        stream_TD = stream_TD + self.post_feedforward_layernorm(x_TD)[0]
        if input_TP is not None:
            (input_TP,) = select_outputs(context, input_TP)
            x_TD = self.per_layer_projection(self.act(self.per_layer_input_gate(stream_TD)) * input_TP)
            stream_TD = stream_TD + self.post_per_layer_input_norm(x_TD)[0]
        return stream_TD * self.layer_scalar


class LayerInputs(nn.Module):
    """What each layer is given of a token: a vector looked up by its id plus one projected from its embedding."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.size = config.hidden_size_per_layer_input
        all_layers = config.num_hidden_layers * self.size
        self.embed_tokens = Embedding(config.vocab_size_per_layer_input, all_layers)
        self.projection = Linear(config.hidden_size, all_layers, split="nowhere")
        self.norm = RMSNorm(self.size, config.rms_norm_eps)
        self.projection_scale = config.hidden_size**-0.5

    def forward(self, token_ids_T: Tensor, x_TD: Tensor) -> Tensor:
        embedded_TX = self.embed_tokens(token_ids_T) * self.size**0.5
        projected_TX = self.projection(x_TD) * self.projection_scale
        normed_TX = self.norm(projected_TX.view(-1, self.size))[0].view(embedded_TX.shape)
        return (normed_TX + embedded_TX) * 2**-0.5


class Gemma4Decoder(Decoder):
    inputs: LayerInputs | None  # set by the model, as is:
    hidden_size: int

    def forward(self, token_ids_T: Tensor, positions_T: Tensor) -> Tensor:
        x_TD = self.begin(token_ids_T, positions_T)
        if self.context.received is not None:  # behind the stream is what layers are given of each token
            inputs_TX = x_TD[:, self.hidden_size :]
            x_TD = x_TD[:, : self.hidden_size].contiguous()
        else:
            inputs_TX = x_TD[:, :0] if self.inputs is None else self.inputs(token_ids_T, x_TD)
        inputs = inputs_TX.chunk(len(self.layers), 1) if inputs_TX.shape[1] else [None] * len(self.layers)
        last = self.layers[-1]
        for layer, input_TP in zip(self.layers, inputs):
            if not isinstance(layer, Elsewhere):
                x_TD = layer(x_TD, input_TP, positions_T, self.context if layer is last else None)
        return self.norm(x_TD)[0] if self.is_last else torch.cat((x_TD, inputs_TX), 1)


class Gemma4(CausalLM):
    config: Config
    model: Gemma4Decoder
    decoder = Gemma4Decoder
    renames = (
        ("model.embed_tokens_per_layer.", "model.inputs.embed_tokens."),
        ("model.per_layer_model_projection.", "model.inputs.projection."),
        ("model.per_layer_projection_norm.", "model.inputs.norm."),
        (".router.scale", ".router.norm.weight"),
    )

    def __init__(self, config: Config) -> None:
        if config.use_bidirectional_attention == "all":
            raise UnsupportedModelError(
                "tokens of this model see those after them: only models that generate text are supported"
            )
        ropes: dict[str, Rope] = {}
        for layer_idx in range(config.num_hidden_layers):
            layer_type = config.layer_type(layer_idx)
            head_size = config.of_layer(layer_idx).head_size
            scaling = (config.rope_parameters or ROPES)[layer_type]
            rope = Rope(head_size, scaling["rope_theta"], scaling, config.max_position_embeddings)
            ropes.setdefault(layer_type, rope)
        layers = [
            Gemma4Layer(config, layer_idx, ropes[config.layer_type(layer_idx)])
            for layer_idx in range(config.num_hidden_layers)
        ]
        super().__init__(
            config,
            layers,
            config.norm(),
            embed_scale=config.hidden_size**0.5,
            logit_softcap=config.final_logit_softcapping,
        )
        self.model.hidden_size = config.hidden_size
        self.model.inputs = LayerInputs(config) if config.hidden_size_per_layer_input else None
        # Checkpoints hold projections of keys and values even of layers that read another layer's cache.
        sharing = [layer_idx for layer_idx in range(config.num_hidden_layers) if config.owner(layer_idx) is not None]
        names = ("k_proj", "v_proj", "k_norm")
        self.unused = tuple(f".{layer_idx}.self_attn.{name}.weight" for layer_idx in sharing for name in names)

    @property
    def stream_size(self) -> int:
        return self.config.hidden_size + self.config.num_hidden_layers * self.config.hidden_size_per_layer_input


MODEL = Gemma4
