"""Every model file against transformers: tiny random weights, float32, every way tokens can reach the cache."""

import dataclasses

import pytest
import torch
import transformers

from quire import LLM, SamplingParams
from quire.models import llama

VARIANTS = {
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

# One thread: the models are too small for two.
OPTIONS = {"dtype": "float32", "skip_tokenizer_init": True, "kv_cache_memory_bytes": 64 << 20, "num_threads": 1}
PROMPTS = [[(7 * i + j * j) % 256 for j in range(n)] for i, n in enumerate((1, 5, 17, 40, 90))]


def oracle(changes: dict, folder):
    """A transformers model with random, non-degenerate weights, saved for us to load."""
    fields = {**llama.TINY, **changes}
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


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_llama_equals_transformers(changes, tmp_path):
    model = oracle(changes, tmp_path)
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
    model = oracle({}, tmp_path)
    with LLM(str(tmp_path), **OPTIONS) as llm:
        params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
        first = llm.generate(PROMPTS[-1], params, use_tqdm=False)[0]
        second = llm.generate(PROMPTS[-1], params, use_tqdm=False)[0]
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 80)
    assert first.outputs[0].token_ids == second.outputs[0].token_ids
    assert_greedy(model, PROMPTS[-1], first.outputs[0].token_ids)


def test_dynamic_rope_past_the_trained_length_is_what_transformers_does_token_by_token(tmp_path):
    model = oracle({"max_position_embeddings": 64, "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, tmp_path)
    prompt = PROMPTS[3]
    with torch.no_grad():
        answer = model.generate(torch.tensor([prompt]), max_new_tokens=60, do_sample=False, eos_token_id=-1, pad_token_id=0)[0, 40:].tolist()
    with LLM(str(tmp_path), **OPTIONS, max_model_len=160) as llm:
        ours = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=60, ignore_eos=True), use_tqdm=False)[0]
    assert ours.outputs[0].token_ids == answer


def test_the_config_reads_hugging_faces_defaults():
    reference = transformers.LlamaConfig()
    for field in dataclasses.fields(llama.Config):
        if field.default is not dataclasses.MISSING and field.name not in ("rope_theta", "rope_scaling", "sliding_window"):
            theirs = getattr(reference, field.name)
            assert field.default == theirs or field.name in ("num_key_value_heads", "head_dim"), field.name
