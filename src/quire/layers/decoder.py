"""The frame of a decoder: an embedding, layers over a residual stream, a norm, a head; and four orders of norms.

Used by models. The residual stream is passed on as (x, residual), and is their sum: the next norm adds them. The last
layer is given the step's `context`: after its attention it computes only the tokens whose hidden states are wanted.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn

from quire.errors import BadModelFileError
from quire.layers.attention import Attention
from quire.layers.base import Layer, StepContext
from quire.layers.config import DecoderConfig
from quire.layers.embedding import Embedding
from quire.layers.linear import LMHead
from quire.layers.weights import CheckpointTensor
from quire.ops.rounding.reference import FLOAT8

MakeNorm = Callable[[], nn.Module]


class PreNormLayer(nn.Module):
    """x += attention(norm(x)); x += mlp(norm(x)). `residual_scale` multiplies what is added.

    A block with an `input_layer` reads its inputs by that layer alone, which may want the norm's outputs rounded.
    """

    def __init__(self, self_attn: nn.Module, mlp: nn.Module, norm: MakeNorm, residual_scale: float = 1.0) -> None:
        super().__init__()
        self.input_layernorm = norm()
        self.self_attn = self_attn
        self.post_attention_layernorm = norm()
        self.mlp = mlp
        self.residual_scale = residual_scale

    def forward(
        self, x_TD: Tensor, residual_TD: Tensor | None, positions_T: Tensor, context: StepContext | None = None
    ) -> tuple[Tensor, Tensor]:
        x_TD, residual_TD = self.input_layernorm(x_TD, residual_TD, then=getattr(self.self_attn, "input_layer", None))
        x_TD = scaled(self.self_attn(x_TD, positions_T), self.residual_scale)
        x_TD, residual_TD = select_outputs(context, x_TD, residual_TD)
        x_TD, residual_TD = self.post_attention_layernorm(
            x_TD, residual_TD, then=getattr(self.mlp, "input_layer", None)
        )
        return scaled(self.mlp(x_TD), self.residual_scale), residual_TD


class PostNormLayer(nn.Module):
    """x += norm(attention(x)); x += norm(mlp(x))."""

    def __init__(self, self_attn: nn.Module, mlp: nn.Module, norm: MakeNorm) -> None:
        super().__init__()
        self.self_attn = self_attn
        self.post_attention_layernorm = norm()
        self.mlp = mlp
        self.post_feedforward_layernorm = norm()

    def forward(
        self, x_TD: Tensor, residual_TD: Tensor | None, positions_T: Tensor, context: StepContext | None = None
    ) -> tuple[Tensor, Tensor]:
        stream_TD = x_TD if residual_TD is None else x_TD + residual_TD
        x_TD = self.post_attention_layernorm(self.self_attn(stream_TD, positions_T))[0]
        x_TD, stream_TD = select_outputs(context, x_TD, stream_TD)
        stream_TD = stream_TD + x_TD
        return self.post_feedforward_layernorm(self.mlp(stream_TD))[0], stream_TD


class SandwichLayer(nn.Module):
    """x += norm(attention(norm(x))); x += norm(mlp(norm(x)))."""

    def __init__(self, self_attn: nn.Module, mlp: nn.Module, norm: MakeNorm) -> None:
        super().__init__()
        self.input_layernorm = norm()
        self.self_attn = self_attn
        self.post_attention_layernorm = norm()
        self.pre_feedforward_layernorm = norm()
        self.mlp = mlp
        self.post_feedforward_layernorm = norm()

    def forward(
        self, x_TD: Tensor, residual_TD: Tensor | None, positions_T: Tensor, context: StepContext | None = None
    ) -> tuple[Tensor, Tensor]:
        x_TD, residual_TD = self.input_layernorm(x_TD, residual_TD)
        x_TD, residual_TD = select_outputs(context, self.self_attn(x_TD, positions_T), residual_TD)
        x_TD = self.post_attention_layernorm(x_TD)[0]
        x_TD, residual_TD = self.pre_feedforward_layernorm(x_TD, residual_TD)
        return self.post_feedforward_layernorm(self.mlp(x_TD))[0], residual_TD


class ParallelLayer(nn.Module):
    """x += attention(norm(x)) + mlp(norm(x)). Both read the same norm, unless `mlp_norm` makes another for the MLP."""

    def __init__(self, self_attn: nn.Module, mlp: nn.Module, norm: MakeNorm, mlp_norm: MakeNorm | None = None) -> None:
        super().__init__()
        self.input_layernorm = norm()
        self.self_attn = self_attn
        self.mlp_layernorm = None if mlp_norm is None else mlp_norm()
        self.mlp = mlp

    def forward(
        self, x_TD: Tensor, residual_TD: Tensor | None, positions_T: Tensor, context: StepContext | None = None
    ) -> tuple[Tensor, Tensor]:
        x_TD, residual_TD = self.input_layernorm(x_TD, residual_TD)
        attended_TD, x_TD, residual_TD = select_outputs(context, self.self_attn(x_TD, positions_T), x_TD, residual_TD)
        if self.mlp_layernorm is not None:
            x_TD = self.mlp_layernorm(residual_TD)[0]
        return attended_TD + self.mlp(x_TD), residual_TD


class Elsewhere(nn.Module):
    """A part of the model that another stage of the pipeline has."""


class Decoder(Layer):
    """In a pipeline each stage has a range of the layers; what goes from one to the next is the residual stream."""

    def __init__(
        self, embed_tokens: Embedding, layers: Iterable[nn.Module], norm: nn.Module, embed_scale: float
    ) -> None:
        super().__init__()
        self.embed_tokens = embed_tokens
        self.layers = nn.ModuleList(layers)
        self.norm = norm
        self.embed_scale = embed_scale

    def forward(self, token_ids_T: Tensor, positions_T: Tensor) -> Tensor:
        x_TD = self.begin(token_ids_T, positions_T)
        residual_TD = None
        *layers, last = self.own_layers
        for layer in layers:
            x_TD, residual_TD = layer(x_TD, residual_TD, positions_T)
        if not self.is_last:
            x_TD, residual_TD = last(x_TD, residual_TD, positions_T)
            return self.kernels.add(x_TD, residual_TD)
        x_TD, residual_TD = last(x_TD, residual_TD, positions_T, self.context)
        return self.norm(x_TD, residual_TD)[0]

    @property
    def own_layers(self) -> list[nn.Module]:
        return [layer for layer in self.layers if not isinstance(layer, Elsewhere)]

    @property
    def is_last(self) -> bool:
        """This stage has the model's last layer."""
        return not isinstance(self.norm, Elsewhere)

    def begin(self, token_ids_T: Tensor, positions_T: Tensor) -> Tensor:
        """What the first of its layers reads."""
        received = self.context.received
        return self.embed(token_ids_T, positions_T) if received is None else received

    def embed(self, token_ids_T: Tensor, positions_T: Tensor) -> Tensor:
        return scaled(self.embed_tokens(token_ids_T), self.embed_scale)


# Of a checkpoint made for float8 KV caches. Queries and probabilities are never rounded here.
CACHE_SCALES = (".k_scale", ".v_scale", ".q_scale", ".prob_output_scale")


class CausalLM(Layer):
    """What the runner runs. Class attributes say how a family's checkpoints differ from the names used here."""

    renames: tuple[tuple[str, str], ...] = ()  # (part of a checkpoint's name, the same part here), applied in order
    unused: tuple[str, ...] = ()  # tensors of checkpoints whose names end so are not needed
    has_drafts = False  # checkpoints have layers past the last that predict further tokens; they are not used here
    decoder: type[Decoder] = Decoder
    lm_head: LMHead | Elsewhere

    def __init__(
        self,
        config: DecoderConfig,
        layers: Iterable[nn.Module],
        norm: nn.Module,
        *,
        embed_scale: float = 1.0,
        logit_scale: float = 1.0,
        logit_softcap: float | None = None,
        head_bias: bool = False,
    ) -> None:
        super().__init__()
        self.config = config
        is_tied = config.tie_word_embeddings
        embed_tokens = Embedding(config.vocab_size, config.hidden_size, is_tied)
        self.model = self.decoder(embed_tokens, layers, norm, embed_scale)
        tied_to = "model.embed_tokens" if is_tied else None
        self.lm_head = LMHead(config.hidden_size, config.vocab_size, head_bias, tied_to)
        self.logit_scale = logit_scale
        self.logit_softcap = logit_softcap

    @property
    def stream_size(self) -> int:
        """How many numbers of each token go from one stage of a pipeline to the next."""
        return self.config.hidden_size

    def take_stage(self, first: int, end: int) -> None:
        """Keeps layers `first` to `end`, and at either end of the model what belongs there."""
        decoder = self.model
        is_first, is_last = first == 0, end == len(decoder.layers)
        for idx in range(len(decoder.layers)):
            if not first <= idx < end:
                decoder.layers[idx] = Elsewhere()
        if not is_first:
            for name, _ in list(decoder.named_children()):
                if name not in ("layers", "norm"):  # embeddings: what they give is part of the stream
                    setattr(decoder, name, Elsewhere())
        if not is_last:
            decoder.norm = Elsewhere()
            self.lm_head = Elsewhere()
            if is_first:  # it may have left the keeping of the table to the head
                decoder.embed_tokens.methods = [decoder.embed_tokens.method]

    def forward(self, token_ids_T: Tensor, positions_T: Tensor) -> Tensor:
        """Final hidden states of the tokens that the step's context selects, for the runner to give to `logits`; in an
        earlier stage of a pipeline, what the next one begins with."""
        return self.model(token_ids_T, positions_T)

    def logits(self, hidden_RD: Tensor) -> Tensor:
        logits_RV = scaled(self.lm_head(hidden_RD), self.logit_scale)
        if self.logit_softcap:
            logits_RV = self.logit_softcap * torch.tanh(logits_RV / self.logit_softcap)
        return logits_RV

    def translate(self, name: str, tensor: CheckpointTensor) -> Iterator[tuple[str, CheckpointTensor]]:
        """A checkpoint's tensor by its name here, with its rows in our order; a family may split it into several."""
        for theirs, ours in self.renames:
            name = name.replace(theirs, ours)
        layer = name.removeprefix("model.layers.").split(".")[0]
        is_copy = name == "lm_head.weight" and self.config.tie_word_embeddings
        is_past_last = layer.isdigit() and int(layer) >= self.config.num_hidden_layers
        is_draft = self.has_drafts and is_past_last
        is_unused = is_draft or is_copy or name.endswith(self.unused)
        if name.endswith(CACHE_SCALES):
            self._take_cache_scale(name, tensor)
        elif not is_unused:
            yield name, tensor

    def _take_cache_scale(self, name: str, tensor: CheckpointTensor) -> None:
        """The scale that a checkpoint has for all cached keys, or values, of a layer: used if the cache is float8."""
        found = re.fullmatch(r"(.+)\.self_attn\.(?:[kv]_proj\.)?([kv])_scale", name)
        if not found or self.runtime.cache_dtype != FLOAT8:
            return
        attention = dict(self.named_modules()).get(f"{found[1]}.self_attn.attn")
        if not isinstance(attention, Attention):
            return
        values = tensor.read().dense(torch.float32).flatten()
        if len(values) != 1 or not 0 < values.item() < math.inf:
            raise BadModelFileError(f"{name} must be one positive number: the scale of a layer's KV cache")
        attention.own_scales["keys" if found[2] == "k" else "values"] = values.item()

    def checkpoint_path(self, path: str) -> str:
        """What checkpoints call the module at `path`; quantizations refer to modules by this name."""
        name = f"{path}."
        for theirs, ours in self.renames:
            name = name.replace(ours, theirs)
        return name.removesuffix(".").removesuffix(".weight")


def scaled(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1.0 else x * factor


def select_outputs(context: StepContext | None, *tensors: Tensor) -> tuple[Tensor, ...]:
    return tensors if context is None else tuple(map(context.select_outputs, tensors))
