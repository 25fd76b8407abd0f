"""The default model, real weights, against transformers on the same file."""

import itertools
import statistics

import pytest
import torch

from quire import LLM, SamplingParams
from tests.prompts import PROMPTS

NUM_TOKENS = 64


@pytest.fixture(scope="module")
def oracle(smollm2):
    """transformers' own reading of the GGUF file, float32."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    fields = load_gguf_checkpoint(str(smollm2), return_tensors=False)["config"]
    model = LlamaForCausalLM._from_config(LlamaConfig(**fields), attn_implementation="eager").float().eval()
    tensors = load_gguf_checkpoint(str(smollm2), return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    return model


@pytest.fixture(scope="module")
def float32_outputs(smollm2):
    with LLM("smollm2", dtype="float32", max_model_len=512, generation_config="none") as llm:
        params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, prompt_logprobs=0)
        return llm.generate(PROMPTS, params, use_tqdm=False)


def prompt_logprobs(output) -> list[float]:
    return [entry[token].logprob for token, entry in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:])]


def mean_logprob(outputs) -> float:
    return statistics.mean(itertools.chain.from_iterable(map(prompt_logprobs, outputs)))


def test_float32_gives_transformers_tokens_and_logprobs(oracle, float32_outputs):
    worst = 0.0
    for output in float32_outputs:
        prompt, answer = output.prompt_token_ids, output.outputs[0].token_ids
        assert len(answer) == NUM_TOKENS
        with torch.no_grad():
            logprobs = oracle(torch.tensor([prompt + answer])).logits[0].log_softmax(-1)
        assert logprobs[len(prompt) - 1 : -1].argmax(-1).tolist() == answer
        for position, logprob in enumerate(prompt_logprobs(output)):
            worst = max(worst, abs(logprob - logprobs[position, prompt[position + 1]].item()))
    assert worst < 1e-3


@pytest.mark.parametrize("dtype", ["bfloat16", "auto"])
def test_lower_precision_stays_within_a_percent(dtype, float32_outputs):
    with LLM("smollm2", dtype=dtype, max_model_len=512) as llm:
        outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    assert mean_logprob(outputs) == pytest.approx(mean_logprob(float32_outputs), rel=0.01)
