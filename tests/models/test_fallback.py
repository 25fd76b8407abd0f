"""Decoders without a model file: transformers' layers with our attention give what transformers gives, or are refused
with a reason."""

import json

import pytest
import torch

from quire import LLM, SamplingParams
from quire.api.cli import run
from quire.errors import UnsupportedModelError
from quire.worker.build import empty
from quire.worker.kv_cache import kv_specs
from tests.models.oracle import OPTIONS, PROMPTS, TOLERANCE, assert_greedy, largest_error, oracle

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 256,
}
CASES = {
    "StableLmForCausalLM": {
        **SIZES,
        "model_type": "stablelm",
        "partial_rotary_factor": 0.25,
        "use_qkv_bias": True,
        "qk_layernorm": True,
    },
    "OPTForCausalLM": {
        "model_type": "opt",
        "hidden_size": 64,
        "ffn_dim": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "vocab_size": 256,
        "max_position_embeddings": 256,
        "word_embed_proj_dim": 32,
    },
    "NemotronForCausalLM": {**SIZES, "model_type": "nemotron", "head_dim": 32, "partial_rotary_factor": 0.5},
    "HeliumForCausalLM": {
        **SIZES,
        "model_type": "helium",
        "head_dim": 16,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    },
    "SeedOssForCausalLM": {
        **SIZES,
        "model_type": "seed_oss",
        "head_dim": 32,
        "attention_out_bias": True,
        "tie_word_embeddings": True,
    },
}
CASES = {name: {"architectures": [name], **fields} for name, fields in CASES.items()}


@pytest.mark.parametrize("fields", CASES.values(), ids=CASES)
def test_the_fallback_equals_transformers(fields, tmp_path):
    assert largest_error(oracle(fields, tmp_path), tmp_path) < TOLERANCE


def test_info_says_that_a_model_runs_through_the_fallback(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(CASES["NemotronForCausalLM"]))
    argv = ["info", str(tmp_path), "--load-format", "dummy", "--device", "cpu"]
    assert run([*argv, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["model_file"] is None
    assert facts["kv_bytes_per_token"] == 3 * 2 * 2 * 32 * 2
    assert run(argv) == 0
    assert "transformers' own layers" in capsys.readouterr().out


def test_it_computes_in_bfloat16_with_random_weights(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CASES["StableLmForCausalLM"]))
    with LLM(str(tmp_path), **{**OPTIONS, "dtype": "bfloat16"}, load_format="dummy") as llm:
        outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), use_tqdm=False)
    assert all(len(output.outputs[0].token_ids) == 4 for output in outputs)


def test_a_checkpoint_of_the_bare_decoder_is_taken(tmp_path):
    """As some are published: without the prefix that the decoder has inside the model with a head."""
    model = oracle({**CASES["HeliumForCausalLM"], "tie_word_embeddings": True}, tmp_path)
    model.model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["HeliumForCausalLM"]}))
    with LLM(str(tmp_path), **OPTIONS) as llm:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        output = llm.generate(PROMPTS[2], params, use_tqdm=False)[0]
    assert_greedy(model, PROMPTS[2], output.outputs[0].token_ids)


def layers(**fields) -> list[torch.nn.Module]:
    model = empty({**SIZES, "pad_token_id": 0, **fields}, "float32")
    return [model.get_submodule(name.partition(":")[0]) for name in kv_specs(model, torch.float32)]


def test_windows_scales_and_caps_are_what_the_layers_ask_for():
    found = layers(
        architectures=["VaultGemmaForCausalLM"],
        model_type="vaultgemma",
        head_dim=32,
        query_pre_attn_scalar=64,
        sliding_window=24,
        attn_logit_softcapping=20.0,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
    )
    assert [layer.window for layer in found] == [0, 24, 0]
    assert {layer.softcap for layer in found} == {20.0}
    assert {layer.scale for layer in found} == {64**-0.5}


REFUSED = {
    "an encoder with a decoder": ("it is an encoder with a decoder", {"architectures": ["T5ForConditionalGeneration"]}),
    "a recurrent model": ("a state of its own", {"architectures": ["MambaForCausalLM"]}),
    "convolutions between": (
        "layers of type 'conv'",
        {
            "architectures": ["Lfm2ForCausalLM"],
            "layer_types": ["conv", "full_attention", "conv"],
        },
    ),
    "attention without the registry": ("does not go through", {"architectures": ["CodeGenForCausalLM"]}),
    "a decoder that counts positions itself": (
        "not told the positions",
        {"architectures": ["ModernBertDecoderForCausalLM"]},
    ),
    "experts in another form": ("in another form", {"architectures": ["FlexOlmoForCausalLM"], "num_experts": 4}),
    "tokens that see later ones": ("attend to later ones", {"architectures": ["CwmForCausalLM"], "is_causal": False}),
    "RoPE by the longest request": (
        "scale RoPE",
        {
            "architectures": ["HeliumForCausalLM"],
            "rope_scaling": {"rope_type": "dynamic", "factor": 2.0},
        },
    ),
    "a config of another kind": (
        "do not take its config.json",
        {"architectures": ["HeliumForCausalLM"], "hidden_act": "nonsense"},
    ),
    "a name nobody knows": ("no decoder of that name", {"architectures": ["FancyForCausalLM"]}),
    "something else that transformers has": ("no decoder of that name", {"architectures": ["pipeline"]}),
    "a path": ("no decoder of that name", {"architectures": ["os.system"]}),
}


@pytest.mark.parametrize(("says", "fields"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_run_is_refused_in_a_sentence_that_says_why(says, fields):
    with pytest.raises(UnsupportedModelError, match=says) as caught:
        layers(**fields)
    assert "\n" not in str(caught.value) and "quire models" in str(caught.value)


def test_code_and_kernels_that_a_config_names_are_not_fetched():
    names = {"auto_map": {"AutoModelForCausalLM": "evil--module.Evil"}, "attn_implementation": "evil/kernel"}
    assert len(layers(architectures=["HeliumForCausalLM"], head_dim=16, **names)) == 3
    assert len(layers(architectures=["HeliumForCausalLM"], head_dim=16, _attn_implementation="evil/kernel")) == 3
