"""Decoders without a model file: transformers' own layers with our attention, cache, scheduler and sampler.

Built by worker/build.py for architectures that no file here names. Only classes of the installed transformers are run,
never code of a checkpoint. A trial run on `meta` tensors shows what each layer's attention is given; models that we
cannot serve are refused then.

Shape letters: T tokens of the step, H query heads, K key/value heads, D size of a head's keys, E of its values,
X model width, R rows that choose a token, V vocabulary.
"""

import inspect
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from quire.errors import UnsupportedModelError
from quire.layers.attention import Attention
from quire.layers.base import Layer, Runtime, StepContext, join
from quire.layers.linear import Linear, LMHead
from quire.layers.rope import Rope
from quire.layers.weights import CheckpointTensor, Weight

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Our name among transformers' attention functions. Transformers builds no attention mask for names it does not know.
ATTENTION = "quire"
NUM_TRIAL_TOKENS = 3
LAYER_TYPES = {"full_attention", "sliding_attention"}
# Arguments that layers pass to attention functions and that change nothing here.
IMMATERIAL = {
    "dropout",
    "position_ids",
    "position_embeddings",
    "use_cache",
    "cache_position",
    "output_attentions",
    "past_key_values",
}


class _Refusal(Exception):
    """Says why transformers' layers cannot be used, as the end of a sentence."""


class TransformersModel(Layer):
    """What the runner runs, as CausalLM of layers/decoder.py. `hf` is transformers' model, with our linear layers and
    attention."""

    def __init__(self, hf_config: dict[str, Any]) -> None:
        """`hf_config`: all of config.json, its dtype the one to compute in."""
        super().__init__()
        architecture = hf_config["architectures"][0]
        try:
            self.hf = _build(architecture, hf_config)
            self.names = set(self.hf.state_dict())  # before layers are replaced: what checkpoints hold
            self.tied = _find_tied(self.hf)
            _keep_buffers(self.hf)
            _replace_linears(self.hf, self.tied)
            self._separate_head()
            self.context = StepContext()  # of the trial run
            self._try_on_meta()
        except _Refusal as refusal:
            raise UnsupportedModelError(
                f"{architecture!r:.80} has no model file (`quire models` lists those), "
                f"and transformers' layers cannot be used: {refusal}"
            ) from None

    def _separate_head(self) -> None:
        """The runner computes the head after the decoder, and for some rows only. But `hf` calls its decoder before its
        head: so the decoder's `forward` is kept as `decode`, and replaced by one that returns `computed_hidden`."""
        decoder: Any = self.hf.get_decoder()
        if decoder is self.hf or "position_ids" not in inspect.signature(decoder.forward).parameters:
            raise _Refusal("its decoder is not told the positions of tokens")
        self.decode = decoder.forward
        self.computed_hidden: Tensor | None = None
        decoder.forward = self._return_hidden

    def _return_hidden(self, *args: Any, **kwargs: Any) -> Any:
        hidden, self.computed_hidden = self.computed_hidden, None
        return self.output_class(last_hidden_state=hidden)

    def _try_on_meta(self) -> None:
        tokens_T = torch.zeros(NUM_TRIAL_TOKENS, dtype=torch.int64)
        try:
            logits = self.logits(self(tokens_T, tokens_T))
        except (_Refusal, UnsupportedModelError):
            raise
        except Exception as error:
            raise _Refusal(f"they do not run without numbers ({type(error).__name__}: {error!s:.200})") from None
        if logits.shape != (NUM_TRIAL_TOKENS, self.hf.config.vocab_size) or self.computed_hidden is not None:
            raise _Refusal("its head is not computed from the decoder's hidden states")
        layers = [module for module in self.hf.modules() if isinstance(module, PagedAttention)]
        _check_layers(self.hf.config, layers)
        rope = Rope.none()
        for layer in layers:
            layer.rope = rope

    def attach(self, runtime: Runtime, path: str) -> None:
        super().attach(runtime, path)
        self._derive_buffers(runtime.device)

    def weights(self) -> Iterator[Weight]:
        """Parameters of transformers' own modules."""
        for path, module in self.hf.named_modules(prefix="hf"):
            if not isinstance(module, Layer):
                for name, _ in module.named_parameters(recurse=False):
                    yield self.declare(name, join(path, name), owner=module)

    def _derive_buffers(self, device: torch.device) -> None:
        """Computes buffers that checkpoints do not hold, such as the frequencies of RoPE."""
        for module in self.hf.modules():
            derived = {name: buffer for name, buffer in module.named_buffers(recurse=False) if buffer.is_meta}
            for name, buffer in derived.items():
                filler = torch.nan if buffer.is_floating_point() else 0
                module._buffers[name] = torch.full_like(buffer, filler, device=device)
            if derived:
                self.hf._init_weights(module)
            for name in derived:
                if module.get_buffer(name).isnan().any():
                    raise UnsupportedModelError(
                        f"transformers does not derive {name} of its {type(module).__name__} without a checkpoint"
                    )

    def forward(self, token_ids_T: Tensor, positions_T: Tensor) -> Tensor:
        """Final hidden states of the tokens that the step's context selects, for the runner to give to `logits`."""
        output = self.decode(input_ids=token_ids_T[None], position_ids=positions_T[None], use_cache=False)
        self.output_class = type(output)
        return self.context.select_outputs(output.last_hidden_state[0])

    def logits(self, hidden_RX: Tensor) -> Tensor:
        """The head, with what the family does before and after it."""
        self.computed_hidden = hidden_RX[None]
        return self.hf(inputs_embeds=self.computed_hidden, use_cache=False).logits[0]

    def translate(self, name: str, tensor: CheckpointTensor) -> Iterator[tuple[str, CheckpointTensor]]:
        """Names are transformers'; in checkpoints of the bare decoder they lack its prefix."""
        if any(re.search(pattern, name) for pattern in self.hf._keys_to_ignore_on_load_unexpected or ()):
            return
        inner = f"{self.hf.base_model_prefix}.{name}"
        known = next((candidate for candidate in (name, inner) if candidate in self.names), None)
        if known not in self.tied:  # some checkpoints hold the tied copy as well
            yield f"hf.{known}" if known else name, tensor

    def checkpoint_path(self, path: str) -> str:
        return path.removeprefix("hf.")


MODEL = TransformersModel
Config = None  # all of config.json is read


# -- transformers' side ------------------------------------------------------------------------------------------------


def _build(architecture: str, hf_config: dict[str, Any]) -> "PreTrainedModel":
    try:
        import transformers
        from transformers.models.auto import modeling_auto as known
    except ImportError:
        raise _Refusal("transformers is not installed: pip install transformers") from None
    if architecture in known.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.values():
        raise _Refusal("it is an encoder with a decoder, and only decoders are run")
    if architecture not in known.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        raise _Refusal(f"transformers {transformers.__version__} has no decoder of that name")
    model_class = getattr(transformers, architecture)
    if model_class._is_stateful:
        raise _Refusal("it keeps a state of its own beside keys and values")
    if not model_class._can_set_attn_implementation():
        raise _Refusal("its attention does not go through transformers' registry of attention functions")
    # `attn_implementation` and similar fields can name code that would be downloaded.
    fields = {name: value for name, value in hf_config.items() if name != "auto_map" and "implementation" not in name}
    try:
        config = model_class.config_class.from_dict(fields)
        transformers.AttentionInterface.register(ATTENTION, _attend)
        model = model_class._from_config(config, attn_implementation=ATTENTION).eval()
    except Exception as error:  # anything: the class may get a config that is not its own
        raise _Refusal(f"they do not take its config.json ({type(error).__name__}: {error!s:.200})") from None
    _check_model(model)
    return model


def _check_model(model: "PreTrainedModel") -> None:
    from transformers.conversion_mapping import get_model_conversion_mapping

    unknown_types = set(getattr(model.config, "layer_types", None) or ()) - LAYER_TYPES
    if unknown_types:
        raise _Refusal(f"it has layers of type {min(unknown_types)!r}")
    ropes = {str(module.rope_type) for module in model.modules() if hasattr(module, "rope_type")}
    if any("dynamic" in rope or "longrope" in rope for rope in ropes):
        raise _Refusal(
            f"they scale RoPE ({', '.join(sorted(ropes))}) by the longest request of a step, not by each one's length"
        )
    if get_model_conversion_mapping(model, add_legacy=False):
        raise _Refusal("they hold weights in another form than its checkpoints")


def _find_tied(model: "PreTrainedModel") -> dict[str, str]:
    """The head's weight -> the embedding's, if they are one. Models that tie anything else are refused."""
    head = next((name for name, module in model.named_modules() if module is model.get_output_embeddings()), None)
    if head is None:
        raise _Refusal("it has no head over the vocabulary")
    tied: dict[str, str] = dict(model.all_tied_weights_keys)
    if set(tied) - {f"{head}.weight"}:
        raise _Refusal(f"it shares {min(tied)} between layers")
    return tied


def _keep_buffers(model: nn.Module) -> None:
    """Makes parameters of the buffers that checkpoints hold, so that they are loaded."""
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            if name not in module._non_persistent_buffers_set and buffer.is_floating_point():
                del module._buffers[name]
                module.register_parameter(name, nn.Parameter(buffer, requires_grad=False))


# -- layers that replace transformers' ---------------------------------------------------------------------------------


class AnyShapeLinear(Linear):
    """Our linear layers take matrices; transformers' take tensors of any number of dimensions."""

    def forward(self, x: Tensor) -> Tensor:
        shape = *x.shape[:-1], sum(self.out_features)
        if x.is_meta:  # the trial run
            return x.new_empty(shape)
        return super().forward(x.reshape(-1, self.in_features)).view(shape)


class AnyShapeHead(AnyShapeLinear, LMHead):
    pass


def _replace_linears(model: "PreTrainedModel", tied: dict[str, str]) -> None:
    """Every rank has the whole of each linear layer, as we do not know what transformers' layers compute between
    them."""
    head = model.get_output_embeddings()
    tied_to = next((f"hf.{source.removesuffix('.weight')}" for source in tied.values()), None)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is not nn.Linear:
                continue
            sizes = child.in_features, child.out_features
            has_bias = child.bias is not None
            if child is head:
                setattr(parent, name, AnyShapeHead(*sizes, bias=has_bias, tied_to=tied_to))
            else:
                setattr(parent, name, AnyShapeLinear(*sizes, bias=has_bias, split="nowhere"))


class PagedAttention(Attention):
    """Our attention for transformers' shapes. Queries and keys are already rotated."""

    def __init__(self, num_heads: int, num_kv_heads: int, head_size: int, **options: Any) -> None:
        super().__init__(num_heads, num_kv_heads, head_size, None, **options)

    def attend(self, q_1HTD: Tensor, k_1KTD: Tensor, v_1KTE: Tensor) -> Tensor:
        """Returns [1, T, H, E]. Values narrower than keys are padded to their size."""
        value_size = v_1KTE.shape[-1]
        v_1KTD = functional.pad(v_1KTE, (0, self.head_size - value_size))
        qkv_THD = torch.cat([x[0].transpose(0, 1) for x in (q_1HTD, k_1KTD, v_1KTD)], 1)
        # Positions do not matter without RoPE.
        positions_T = torch.zeros(len(qkv_THD), dtype=torch.int64, device=qkv_THD.device)
        out_TX = self(qkv_THD.flatten(1), positions_T)
        return out_TX.view(1, len(qkv_THD), self.num_heads, self.head_size)[..., :value_size]


def _attend(
    layer: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, **options: Any
) -> tuple[Tensor, None]:
    """Our attention function, as transformers' layers call it. In the trial run it gives the layer its
    PagedAttention."""
    if query.is_meta:
        if hasattr(layer, "paged"):
            raise _Refusal("a layer attends twice in a step")
        layer.paged = _make_paged(layer, query, key, value, attention_mask, **options)
        return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3]), None
    return layer.paged.attend(query, key, value), None


def _make_paged(
    layer: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> PagedAttention:
    for name, given in others.items():
        is_given = given is not None and given is not False
        if is_given and name not in IMMATERIAL:
            raise _Refusal(f"its attention is given {name!r}")
    if attention_mask is not None:
        raise _Refusal("it makes an attention mask of its own")
    if is_causal is None:
        is_causal = getattr(layer, "is_causal", True)
    if not is_causal:
        raise _Refusal("its tokens attend to later ones")
    _, num_heads, _, head_size = query.shape
    _, num_kv_heads, num_keys, _ = key.shape
    _, num_value_heads, _, value_size = value.shape
    has_ordinary_heads = num_heads % num_kv_heads == 0 and num_value_heads == num_kv_heads
    has_ordinary_sizes = num_keys == NUM_TRIAL_TOKENS and value_size <= head_size
    if not (has_ordinary_heads and has_ordinary_sizes):
        raise _Refusal("its queries, keys and values do not have the shapes of ordinary attention")
    return PagedAttention(num_heads, num_kv_heads, head_size, scale=scaling, window=sliding_window, softcap=softcap)


def _check_layers(config: Any, layers: list[PagedAttention]) -> None:
    if len(layers) != config.num_hidden_layers:
        raise _Refusal(
            f"only {len(layers)} of its {config.num_hidden_layers} layers attend through transformers' registry"
        )
    # Windows that transformers applies only through attention masks would be lost.
    slides = getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True)
    type_of_all = "sliding_attention" if slides else "full_attention"
    types = getattr(config, "layer_types", None) or [type_of_all] * len(layers)
    for layer_type, layer in zip(types, layers):
        if (layer.window > 0) != (layer_type == "sliding_attention"):
            raise _Refusal("its attention is not told the windows that its config.json gives")
