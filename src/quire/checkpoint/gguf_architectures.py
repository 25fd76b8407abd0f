"""Tables of GGUF's names, with a row per architecture: its keys as those of config.json, its tensors as our modules.

Read by `gguf_config` and by the worker's loader. Knows what converters write and what they change on the way (rows of
q and k, fused tensors, stacked experts); not torch, not how a model computes.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from quire.checkpoint.gguf import GGUFFile
from quire.errors import BadModelFileError, UnsupportedModelError

SCALING = "rope.scaling."

# HF key -> GGUF key after the architecture's prefix
_SIZES = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rope_theta": "rope.freq_base",
    "max_position_embeddings": "context_length",
    "vocab_size": "vocab_size",
}
_KEYS = {**_SIZES, "rms_norm_eps": "attention.layer_norm_rms_epsilon"}
_LAYER_NORM = "attention.layer_norm_epsilon"
_WINDOW = {"sliding_window": "attention.sliding_window"}
_PART_ROTATES = {"partial_rotary_factor": "rope.dimension_count"}
_SOFTCAPS = {"attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping"}
_EXPERTS = {"num_experts_per_tok": "expert_used_count", "norm_topk_prob": "expert_weights_norm"}
# The first layers have one MLP. The others have experts of another size, some of which all tokens share.
_SOME_DENSE = {
    "first_k_dense_replace": "leading_dense_block_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "n_routed_experts": "expert_count",
    "n_shared_experts": "expert_shared_count",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "routed_scaling_factor": "expert_weights_scale",
}

# GGUF's tensors -> our modules, those of a layer below `model.layers.N`. Layers have the same names in all our models,
# and the numbers in the file are the ones we compute with (norms include their offset, projections are not transposed).
# So names and numbers differ from a Hugging Face checkpoint in some families. A tensor that the model does not have is
# refused when it is loaded.
_OUTSIDE = {
    "token_embd": "model.embed_tokens",
    "position_embd": "model.embed_positions",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.*.gate_proj",  # one tensor for all experts; * stands for each expert's number
    "ffn_up_exps": "mlp.experts.*.up_proj",
    "ffn_down_exps": "mlp.experts.*.down_proj",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
# For models with norms after attention and MLP, in addition to those before or instead of them.
_POST_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_FUSED_MLP = {"ffn_up": "mlp.gate_up_proj"}
_NUMBERED_EXPERTS = {
    "ffn_gate_exps": "mlp.experts.*.w1",
    "ffn_up_exps": "mlp.experts.*.w3",
    "ffn_down_exps": "mlp.experts.*.w2",
}
# Tensors that follow from the config, which includes the first three.
_NO_WEIGHTS = ("rope_freqs", "rope_factors_long", "rope_factors_short", "attn_rot_embd")
_LAYER = re.compile(r"blk\.(\d{1,4})\.", re.ASCII)
_TENSOR_NAME = re.compile(r"(?:blk\.(\d{1,4})\.)?(\w+)\.(weight|bias)", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFArchitecture:
    """How files of one `general.architecture` are translated."""

    architecture: str  # HF class
    model_type: str
    keys: Mapping[str, str] = field(default_factory=lambda: _KEYS)
    defaults: Mapping[str, Any] = field(default_factory=dict)  # what holds where the file does not say
    tensors: Mapping[str, str] = field(default_factory=dict)  # what differs from `_IN_LAYER`
    permutes_qk: bool = False  # rows of q and k are stored in another order: see `unpermute_rows`
    fuses_qkv: bool = False  # our model has q, k and v in one tensor, too
    routes_by_sigmoid: bool = False
    # Where the file has a window and no pattern: the last of so many layers has full attention, the others the window.
    window_period: int | None = None
    finish: Callable[[dict[str, Any], GGUFFile], None] | None = None  # changes the config where no table can say it
    # Other rows, each with the test for the files it applies to.
    variants: tuple[tuple[Callable[[GGUFFile], bool], "GGUFArchitecture"], ...] = ()

    def name(self, tensor_name: str) -> str | None:
        """The tensor's name in our model; None for tensors that are no weights."""
        if match := _TENSOR_NAME.fullmatch(tensor_name):
            layer_idx, stem, kind = match.groups()
            if stem in _NO_WEIGHTS:
                return None
            if layer_idx is None and stem in _OUTSIDE:
                return f"{_OUTSIDE[stem]}.{kind}"
            path = self.tensors.get(stem) or _IN_LAYER.get(stem)
            if layer_idx is not None and path:
                separator = "" if path.endswith("_") else "."
                return f"model.layers.{int(layer_idx)}.{path}{separator}{kind}"
        raise UnsupportedModelError(
            f"the GGUF file holds a tensor {tensor_name!r:.80} that {self.model_type} models do not have: "
            "use another file."
        )

    def pieces(
        self, tensor_name: str, shape: tuple[int, ...], config: Mapping[str, Any]
    ) -> Iterator[tuple[str, slice | list[int]]]:
        """The tensors of our model that a stored tensor becomes: the name of each, and which stored rows it gets.

        `config`: as `config_from_gguf` gives it.
        """
        layer = _LAYER.match(tensor_name)
        if config.get("num_nextn_predict_layers") and layer:
            if int(layer[1]) >= config["num_hidden_layers"]:
                return  # the layers after the last predict further tokens, which is not done here
        name = self.name(tensor_name)
        if name is None:
            return
        num_heads = config["num_attention_heads"]
        num_kv_heads = config["num_key_value_heads"]
        head_dim = config["head_dim"]
        permuted = {"q_proj": num_heads, "k_proj": num_kv_heads} if self.permutes_qk else {}
        start = 0
        for part, num_rows in self._parts(name, shape, num_kv_heads * head_dim):
            heads = permuted.get(part.split(".")[-2])
            if heads is not None and num_rows == heads * head_dim:  # if it is not, loading refuses it
                yield part, [start + row for row in unpermute_rows(num_rows, heads)]
            else:
                yield part, slice(start, start + num_rows)
            start += num_rows

    def _parts(self, name: str, shape: tuple[int, ...], kv_size: int) -> Iterator[tuple[str, int]]:
        """The tensors stacked in one, with the number of rows of each."""
        num_rows = math.prod(shape[:-1]) if len(shape) > 1 else shape[0]
        if "*" in name:
            num_experts = shape[0]
            for expert_idx in range(num_experts):
                yield name.replace("*", str(expert_idx)), num_rows // num_experts
        elif ".qkv_proj." in name and not self.fuses_qkv:
            yield name.replace("qkv_proj", "q_proj"), num_rows - 2 * kv_size
            yield name.replace("qkv_proj", "k_proj"), kv_size
            yield name.replace("qkv_proj", "v_proj"), kv_size
        else:
            yield name, num_rows


def unpermute_rows(num_rows: int, num_heads: int) -> list[int]:
    """For each row of our weight, which stored row it is: `ours = stored[unpermute_rows(...)]`.

    Architectures with `permutes_qk` store the rows of attn_q and attn_k (weights and biases) in the order of
    interleaved RoPE: within each head, rows i and i + head_dim/2, which rotate together, are stored as 2i and 2i + 1.
    Our models rotate halves, as Hugging Face's do, so loading such a file must undo it, with the `num_heads` of q or
    of k. A row is a whole number of quantization blocks, so packed weights can be reordered as they are.
    """
    head_dim = num_rows // num_heads
    one_head = [2 * pair + half for half in range(2) for pair in range(head_dim // 2)]
    return [head * head_dim + row for head in range(num_heads) for row in one_head]


# ---- the rows ----


def _gemma_scale(large: int) -> Callable[[dict[str, Any], GGUFFile], None]:
    """Scores are divided by the root of the head size, except in the 27B model, the one with `large` layers."""

    def finish(config: dict[str, Any], gguf: GGUFFile) -> None:
        hidden_per_head = config["hidden_size"] // config["num_attention_heads"]
        is_large = config["num_hidden_layers"] == large
        config["query_pre_attn_scalar"] = hidden_per_head if is_large else config["head_dim"]

    return finish


def _starcoder2(config: dict[str, Any], gguf: GGUFFile) -> None:
    config["use_bias"] = config["attention_bias"]


def _falcon(config: dict[str, Any], gguf: GGUFFile) -> None:
    """Files do not name Falcon's layout, one of three: converters undid the differences, except in heads and norms."""
    config["ffn_hidden_size"] = config.pop("intermediate_size")
    config["num_kv_heads"] = config["num_key_value_heads"]
    config["multi_query"] = config["num_key_value_heads"] == 1
    config["new_decoder_architecture"] = not config["multi_query"]
    config["num_ln_in_parallel_attn"] = 1 + _has_two_norms(gguf)
    config["bias"] = config["attention_bias"]


def _glm4_moe(config: dict[str, Any], gguf: GGUFFile) -> None:
    config["num_hidden_layers"] -= config.get("num_nextn_predict_layers", 0)
    config["use_qk_norm"] = "blk.0.attn_q_norm.weight" in gguf.tensors


def _has_experts(gguf: GGUFFile) -> bool:
    return bool(gguf.metadata.get(f"{gguf.metadata['general.architecture']}.expert_count"))


def _has_two_norms(gguf: GGUFFile) -> bool:
    return "blk.0.attn_norm_2.weight" in gguf.tensors


def _has_window(gguf: GGUFFile) -> bool:
    return bool(gguf.metadata.get("olmo2.attention.sliding_window"))


def _is_parallel(gguf: GGUFFile) -> bool:
    return bool(gguf.metadata.get("gptneox.use_parallel_residual", True))


_OLMO3 = GGUFArchitecture(
    architecture="Olmo3ForCausalLM", model_type="olmo3", keys={**_KEYS, **_WINDOW}, tensors=_POST_NORMS, window_period=4
)
_MIXTRAL = GGUFArchitecture(
    architecture="MixtralForCausalLM",
    model_type="mixtral",
    keys={**_KEYS, **_WINDOW, "num_experts": "expert_count", "num_experts_per_tok": "expert_used_count"},
    tensors=_NUMBERED_EXPERTS,
    permutes_qk=True,
)
_GPT_NEOX = GGUFArchitecture(
    architecture="GPTNeoXForCausalLM",
    model_type="gpt_neox",
    keys={
        **_SIZES,
        **_PART_ROTATES,
        "layer_norm_eps": _LAYER_NORM,
        "use_parallel_residual": "use_parallel_residual",
    },
    defaults={"hidden_act": "gelu"},
    fuses_qkv=True,
)
_GPT_NEOX_PARALLEL = replace(_GPT_NEOX, tensors={"ffn_norm": "mlp_layernorm"})
_FALCON = GGUFArchitecture(
    architecture="FalconForCausalLM",
    model_type="falcon",
    keys={**_SIZES, "layer_norm_epsilon": _LAYER_NORM},
    defaults={"activation": "gelu"},
    fuses_qkv=True,
    finish=_falcon,
)
_FALCON_TWO_NORMS = replace(_FALCON, tensors={"attn_norm": "mlp_layernorm", "attn_norm_2": "input_layernorm"})

GGUF_ARCHITECTURES: dict[str, GGUFArchitecture] = {
    "llama": GGUFArchitecture(
        architecture="LlamaForCausalLM",
        model_type="llama",
        keys={**_KEYS, **_WINDOW},
        permutes_qk=True,
        variants=((_has_experts, _MIXTRAL),),
    ),
    "smollm3": GGUFArchitecture(architecture="SmolLM3ForCausalLM", model_type="smollm3", permutes_qk=True),
    "granite": GGUFArchitecture(
        architecture="GraniteForCausalLM",
        model_type="granite",
        keys={
            **_KEYS,
            "embedding_multiplier": "embedding_scale",
            "attention_multiplier": "attention.scale",
            "residual_multiplier": "residual_scale",
            "logits_scaling": "logit_scale",
        },
        permutes_qk=True,
    ),
    "qwen2": GGUFArchitecture(architecture="Qwen2ForCausalLM", model_type="qwen2"),
    "qwen3": GGUFArchitecture(architecture="Qwen3ForCausalLM", model_type="qwen3"),
    "qwen2moe": GGUFArchitecture(
        architecture="Qwen2MoeForCausalLM",
        model_type="qwen2_moe",
        keys={
            **_KEYS,
            **_EXPERTS,
            "num_experts": "expert_count",
            "moe_intermediate_size": "expert_feed_forward_length",
            "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
        },
    ),
    "qwen3moe": GGUFArchitecture(
        architecture="Qwen3MoeForCausalLM",
        model_type="qwen3_moe",
        keys={
            **_KEYS,
            **_EXPERTS,
            "num_experts": "expert_count",
            "moe_intermediate_size": "expert_feed_forward_length",
        },
        defaults={"norm_topk_prob": True},
    ),
    "olmoe": GGUFArchitecture(
        architecture="OlmoeForCausalLM",
        model_type="olmoe",
        keys={**_KEYS, **_EXPERTS, "num_experts": "expert_count", "clip_qkv": "attention.clamp_kqv"},
    ),
    "glm4moe": GGUFArchitecture(
        architecture="Glm4MoeForCausalLM",
        model_type="glm4_moe",
        keys={**_KEYS, **_PART_ROTATES, **_EXPERTS, **_SOME_DENSE, "num_nextn_predict_layers": "nextn_predict_layers"},
        tensors={"post_attention_norm": "post_attention_layernorm", "exp_probs_b": "mlp.gate.e_score_correction_"},
        routes_by_sigmoid=True,
        finish=_glm4_moe,
    ),
    "minimax-m2": GGUFArchitecture(
        architecture="MiniMaxM2ForCausalLM",
        model_type="minimax_m2",
        keys={**_KEYS, **_PART_ROTATES, "num_experts": "expert_count", "num_experts_per_tok": "expert_used_count"},
        tensors={**_NUMBERED_EXPERTS, "exp_probs_b": "mlp.e_score_correction_"},
        routes_by_sigmoid=True,
    ),
    "ernie4_5-moe": GGUFArchitecture(
        architecture="Ernie4_5_MoeForCausalLM",
        model_type="ernie4_5_moe",
        keys={
            **_KEYS,
            "moe_num_experts": "expert_count",
            "moe_k": "expert_used_count",
            "moe_intermediate_size": "expert_feed_forward_length",
            "moe_num_shared_experts": "expert_shared_count",
            "moe_layer_start_index": "leading_dense_block_count",
            "moe_layer_interval": "interleave_moe_layer_step",
        },
        tensors={"exp_probs_b": "mlp.moe_statics.e_score_correction_"},
    ),
    "gemma2": GGUFArchitecture(
        architecture="Gemma2ForCausalLM",
        model_type="gemma2",
        keys={**_KEYS, **_WINDOW, **_SOFTCAPS},
        defaults={"sliding_window": 4096, "hidden_activation": "gelu_pytorch_tanh"},
        tensors=_POST_NORMS,
        window_period=2,
        finish=_gemma_scale(large=46),
    ),
    "gemma3": GGUFArchitecture(
        architecture="Gemma3ForCausalLM",
        model_type="gemma3_text",
        keys={
            **_KEYS,
            **_WINDOW,
            "rope_local_base_freq": "rope.freq_base_swa",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        defaults={"rope_local_base_freq": 10000.0, "hidden_activation": "gelu_pytorch_tanh"},
        tensors=_POST_NORMS,
        window_period=6,
        finish=_gemma_scale(large=62),
    ),
    "phi2": GGUFArchitecture(
        architecture="PhiForCausalLM",
        model_type="phi",
        keys={**_SIZES, **_PART_ROTATES, "layer_norm_eps": _LAYER_NORM},
        defaults={"hidden_act": "gelu_new"},
    ),
    "phi3": GGUFArchitecture(
        architecture="Phi3ForCausalLM",
        model_type="phi3",
        keys={
            **_KEYS,
            **_WINDOW,
            **_PART_ROTATES,
            "original_max_position_embeddings": SCALING + "original_context_length",
        },
        tensors=_FUSED_MLP,
        fuses_qkv=True,
    ),
    "olmo2": GGUFArchitecture(
        architecture="Olmo2ForCausalLM", model_type="olmo2", tensors=_POST_NORMS, variants=((_has_window, _OLMO3),)
    ),
    "glm4": GGUFArchitecture(
        architecture="Glm4ForCausalLM",
        model_type="glm4",
        keys={**_KEYS, **_PART_ROTATES},
        tensors={**_POST_NORMS, **_FUSED_MLP},
    ),
    "cohere2": GGUFArchitecture(
        architecture="Cohere2ForCausalLM",
        model_type="cohere2",
        keys={**_SIZES, **_WINDOW, "layer_norm_eps": _LAYER_NORM, "logit_scale": "logit_scale"},
        window_period=4,
    ),
    "starcoder2": GGUFArchitecture(
        architecture="Starcoder2ForCausalLM",
        model_type="starcoder2",
        keys={**_SIZES, **_WINDOW, "norm_epsilon": _LAYER_NORM},
        defaults={"hidden_act": "gelu_pytorch_tanh"},
        finish=_starcoder2,
    ),
    "gpt2": GGUFArchitecture(
        architecture="GPT2LMHeadModel",
        model_type="gpt2",
        keys={**_SIZES, "layer_norm_epsilon": _LAYER_NORM},
        defaults={"activation_function": "gelu_new"},
        fuses_qkv=True,
    ),
    "gptneox": replace(_GPT_NEOX, variants=((_is_parallel, _GPT_NEOX_PARALLEL),)),
    "falcon": replace(_FALCON, variants=((_has_two_norms, _FALCON_TWO_NORMS),)),
}


def gguf_architecture(gguf: GGUFFile) -> GGUFArchitecture:
    name = gguf.metadata.get("general.architecture")
    if not isinstance(name, str):
        raise BadModelFileError(f"{gguf.path.name} names no architecture: fetch it again or use another file.")
    if name not in GGUF_ARCHITECTURES:
        known = ", ".join(GGUF_ARCHITECTURES)
        raise UnsupportedModelError(
            f"{gguf.path.name} has the architecture {name!r:.80}: Quire reads GGUF files of {known}."
        )
    row = GGUF_ARCHITECTURES[name]
    return next((variant for holds, variant in row.variants if holds(gguf)), row)
