"""Every model file against transformers: tiny random weights, float32, every way tokens can reach the cache."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
import transformers

from quire import LLM, SamplingParams, registry
from quire.models import llama, qwen3
from quire.ops.cpu import linear

LLAMAS = {
    "llama": {},
    "tied": {"tie_word_embeddings": True},
    "biased": {"attention_bias": True, "mlp_bias": True},
    "all heads": {"num_key_value_heads": 4},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "llama3": {
        "max_position_embeddings": 512,
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
    "dynamic, short": {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    "mistral": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 24},
}  # fmt: skip
QWEN3S = {
    "qwen3": {},
    "tied": {"tie_word_embeddings": True, "attention_bias": True, "head_dim": 16},
    "window unused": {"sliding_window": 24, "max_window_layers": 1},
    "window in later layers": {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    "window in some layers": {
        "use_sliding_window": True, "sliding_window": 24, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
}  # fmt: skip
FAMILIES = {"llama": (llama, LLAMAS), "qwen3": (qwen3, QWEN3S)}
CASES = {f"{family}: {name}": {**module.TINY, **changes} for family, (module, all_) in FAMILIES.items() for name, changes in all_.items()}

SHAPES = Path(__file__).parents[2] / "benchmarks" / "shapes"
# One thread: the models are too small for two.
OPTIONS = {"dtype": "float32", "skip_tokenizer_init": True, "kv_cache_memory_bytes": 64 << 20, "num_threads": 1}
PROMPTS = [[(7 * i + j * j) % 256 for j in range(n)] for i, n in enumerate((1, 5, 17, 40, 90))]


def oracle(fields: dict, folder):
    """A transformers model with random, non-degenerate weights, saved for us to load."""
    fields = dict(fields)
    architecture = fields.pop("architectures")[0]
    fields.pop("model_type")
    config = getattr(transformers, architecture.replace("ForCausalLM", "Config"))(**fields)
    torch.manual_seed(1)
    model = getattr(transformers, architecture)._from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            else:
                parameter.copy_(torch.randn_like(parameter) * 0.15)
        model.tie_weights()
    model.save_pretrained(folder)
    return model


def hf_logprobs(model, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].float().log_softmax(-1)


def assert_greedy(model, prompt: list[int], answer: list[int]) -> None:
    """Each token of the answer is the oracle's likeliest after everything before it."""
    logprobs = hf_logprobs(model, prompt + answer)
    assert logprobs[len(prompt) - 1 : -1].argmax(-1).tolist() == answer


def test_every_model_file_has_its_cases():
    assert list(FAMILIES) == registry.names("quire.models")


@pytest.mark.parametrize("fields", CASES.values(), ids=CASES)
def test_a_model_equals_transformers(fields, tmp_path):
    model = oracle(fields, tmp_path)
    options = {**OPTIONS, "max_model_len": 192}
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, prompt_logprobs=3)
    for engine in ({}, {"max_num_batched_tokens": 7, "max_num_seqs": 3}, {"pipeline_depth": 2, "attention_backend": "reference"}):
        with LLM(str(tmp_path), **options, **engine) as llm:
            outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        for prompt, output in zip(PROMPTS, outputs):
            assert_greedy(model, prompt, output.outputs[0].token_ids)
            expected = hf_logprobs(model, prompt)
            for position, entry in enumerate(output.prompt_logprobs[1:]):
                token = prompt[position + 1]
                assert entry[token].logprob == pytest.approx(expected[position, token].item(), abs=1e-4)


def test_a_prefix_hit_gives_the_same_answer(tmp_path):
    model = oracle(llama.TINY, tmp_path)
    with LLM(str(tmp_path), **OPTIONS) as llm:
        params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
        first = llm.generate(PROMPTS[-1], params, use_tqdm=False)[0]
        second = llm.generate(PROMPTS[-1], params, use_tqdm=False)[0]
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 80)
    assert first.outputs[0].token_ids == second.outputs[0].token_ids
    assert_greedy(model, PROMPTS[-1], first.outputs[0].token_ids)


def test_dynamic_rope_past_the_trained_length_is_what_transformers_does_token_by_token(tmp_path):
    model = oracle({**llama.TINY, "max_position_embeddings": 64, "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, tmp_path)
    prompt = PROMPTS[3]
    with torch.no_grad():
        answer = model.generate(torch.tensor([prompt]), max_new_tokens=60, do_sample=False, eos_token_id=-1, pad_token_id=0)[0, 40:].tolist()
    with LLM(str(tmp_path), **OPTIONS, max_model_len=160) as llm:
        ours = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=60, ignore_eos=True), use_tqdm=False)[0]
    assert ours.outputs[0].token_ids == answer


@pytest.mark.parametrize(("module", "reference"), [(llama, transformers.LlamaConfig), (qwen3, transformers.Qwen3Config)])
def test_the_config_reads_hugging_faces_defaults(module, reference):
    """Except where theirs is None until they have seen the rest, or is the size of one of their models."""
    theirs = {field.name: field.default for field in dataclasses.fields(reference)}
    for field in dataclasses.fields(module.Config):
        if field.default is not dataclasses.MISSING and field.name in theirs and field.name != "num_key_value_heads":
            assert field.default == theirs[field.name], field.name


def test_a_step_of_a_model_that_norms_heads_is_recorded(tmp_path):
    """And what is played from the tape is what Python computes."""
    oracle({**qwen3.TINY, "use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}, tmp_path)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    with LLM(str(tmp_path), **{**OPTIONS, "dtype": "bfloat16"}, max_model_len=192, enable_prefix_caching=False) as llm:
        graphs = llm.client.engine.executor.worker.runner.graphs
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
    with LLM(str(tmp_path), **{**OPTIONS, "dtype": "bfloat16"}, max_model_len=64, load_format="dummy") as llm:
        output = llm.generate([PROMPTS[1]], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True), use_tqdm=False)[0]
    assert len(output.outputs[0].token_ids) == 3
