"""Every model file against transformers: tiny random weights, float32, every way tokens can reach the cache."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
import transformers

from quire import LLM, SamplingParams, registry
from quire.models import llama, qwen2, qwen3
from quire.ops.packed_linear import cpu as linear
from tests.models.oracle import OPTIONS, PROMPTS, TOLERANCE, all_cases, largest_error, oracle

# The classes that must have a file. It is a literal so that none is lost unnoticed.
SUPPORTED = """
LlamaForCausalLM MistralForCausalLM SmolLM3ForCausalLM Qwen2ForCausalLM Qwen3ForCausalLM Gemma2ForCausalLM
Gemma3ForCausalLM Phi3ForCausalLM PhiForCausalLM Olmo2ForCausalLM Olmo3ForCausalLM GlmForCausalLM Glm4ForCausalLM
GraniteForCausalLM Cohere2ForCausalLM Starcoder2ForCausalLM GPT2LMHeadModel GPTNeoXForCausalLM FalconForCausalLM
MiniCPM3ForCausalLM
MixtralForCausalLM Qwen2MoeForCausalLM Qwen3MoeForCausalLM DeepseekV2ForCausalLM DeepseekV3ForCausalLM GptOssForCausalLM
Ernie4_5_MoeForCausalLM Glm4MoeForCausalLM GraniteMoeForCausalLM OlmoeForCausalLM MiniMaxM2ForCausalLM Gemma4ForCausalLM
""".split()
SHAPES = Path(__file__).parents[2] / "benchmarks" / "shapes"
CASES = all_cases()
# (file, one of its types): of a file with several, those that agree on defaults.
MODEL_TYPES = [
    *((name, tiny["model_type"]) for name, tiny in registry.literals("quire.models", "TINY").items()),
    ("glm", "glm4"),
]


def test_every_class_we_promise_has_a_file():
    architectures = registry.literals("quire.models", "ARCHITECTURES")
    found = {name for names in architectures.values() for name in names}
    assert not set(SUPPORTED) - found


@pytest.mark.parametrize("fields", CASES.values(), ids=CASES)
def test_a_model_equals_transformers(fields, tmp_path):
    assert largest_error(oracle(fields, tmp_path), tmp_path) < TOLERANCE


def test_dynamic_rope_past_the_trained_length_is_what_transformers_does_token_by_token(tmp_path):
    scaling = {"rope_type": "dynamic", "factor": 4.0}
    model = oracle({**llama.TINY, "max_position_embeddings": 64, "rope_scaling": scaling}, tmp_path)
    prompt = PROMPTS[3]
    options = {"max_new_tokens": 60, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
    with torch.no_grad():
        answer = model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist()
    with LLM(str(tmp_path), **{**OPTIONS, "max_model_len": 160}) as llm:
        ours = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=60, ignore_eos=True), use_tqdm=False)[0]
    assert ours.outputs[0].token_ids == answer


@pytest.mark.parametrize(("name", "model_type"), MODEL_TYPES)
def test_the_config_reads_hugging_faces_defaults(name, model_type):
    """Except where their default is None until other fields are read, or is the size of one of their models."""
    module = registry.load("quire.models", name)
    reference = transformers.CONFIG_MAPPING[model_type]
    theirs = {field.name: field.default for field in dataclasses.fields(reference)}
    for field in dataclasses.fields(module.Config):
        has_default = field.default is not dataclasses.MISSING
        if has_default and field.name in theirs.keys() - {"num_key_value_heads"}:
            assert field.default == theirs[field.name], field.name


@pytest.mark.parametrize("family", [qwen2, qwen3], ids=["biases", "normed heads"])
def test_a_decoding_step_is_recorded(family, tmp_path):
    """And replaying the recording gives what Python computes."""
    oracle(family.TINY, tmp_path)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    with LLM(str(tmp_path), **{**OPTIONS, "dtype": "bfloat16"}, enable_prefix_caching=False) as llm:
        graphs = llm.client.engine.executor.worker.runner.recordings
        recorded = graphs.tape is not None
        played = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, params, use_tqdm=False)]
        graphs.tape = None
        plain = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, params, use_tqdm=False)]
    assert played == plain
    assert recorded == linear.supported()


def test_a_shape_of_the_benchmarks_loads(tmp_path):
    """With two layers and a small vocabulary, and random weights."""
    config = json.loads((SHAPES / "qwen3-0.6b" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2, "vocab_size": 512}))
    with LLM(str(tmp_path), **{**OPTIONS, "dtype": "bfloat16", "max_model_len": 64}, load_format="dummy") as llm:
        params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
        output = llm.generate([PROMPTS[1]], params, use_tqdm=False)[0]
    assert len(output.outputs[0].token_ids) == 3
