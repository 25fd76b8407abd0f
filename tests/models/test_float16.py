"""`--dtype float16`: every model file is as near to float32 as transformers is in float16; overflows end a request."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLM, SamplingParams, registry
from quire.errors import RequestError
from quire.models import llama
from tests.models.oracle import OPTIONS, PROMPTS, logprobs, oracle

TINY = registry.literals("quire.models", "TINY")
HALF = {**OPTIONS, "dtype": "float16"}
GPU = {"device": "cuda"} if torch.cuda.is_available() else {"device": "cpu", "interpret_triton": True}
devices = pytest.mark.parametrize("device", [{"device": "cpu"}, GPU], ids=["cpu", "gpu"])


def experts_of(tiny: dict) -> dict:
    """Every token goes to all experts: which are chosen would depend on last bits."""
    counts = (tiny.get(name) for name in ("num_local_experts", "num_experts", "n_routed_experts"))
    found = next((count for count in counts if count), None)
    names = [name for name in ("num_experts_per_tok", "top_k_experts", "moe_k") if name in tiny]
    changes = {name: found for name in names} if found else {}
    if found and tiny.get("topk_group"):
        changes["topk_group"] = tiny["n_group"]
    return changes


@pytest.mark.parametrize("name", TINY)
def test_a_model_is_as_near_as_transformers_in_float16(name, tmp_path):
    check_logprobs(name, tmp_path, device="cpu")


# In the interpreter the others take half a minute each.
@pytest.mark.parametrize("name", TINY if torch.cuda.is_available() else ["llama"])
def test_kernels_of_gpus_are_as_near(name, tmp_path):
    check_logprobs(name, tmp_path, **GPU)


def check_logprobs(name, tmp_path, **device):
    model = oracle({**TINY[name], **experts_of(TINY[name])}, tmp_path)
    prompt = PROMPTS[3]
    targets = torch.tensor(prompt[1:])[:, None]
    truth = logprobs(model, prompt)[:-1].gather(1, targets)[:, 0]
    theirs = logprobs(model.half(), prompt)[:-1].gather(1, targets)[:, 0]
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, prompt_logprobs=0)
    with LLM(str(tmp_path), **HALF, **device) as llm:
        output = llm.generate([prompt], params, use_tqdm=False)[0]
    ours = torch.tensor([entry[token].logprob for entry, token in zip(output.prompt_logprobs[1:], prompt[1:])])
    limit = 3 * (theirs - truth).square().mean().sqrt() + 1e-3
    assert (ours - truth).square().mean().sqrt() < limit
    assert len(output.outputs[0].token_ids) == 4


@devices
def test_a_row_that_overflows_ends_with_advice_and_its_neighbours_go_on(device, tmp_path):
    """One token's embedding is so large that the residual does not fit float16."""
    oracle(llama.TINY, tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.embed_tokens.weight"][200] *= 3e5
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    good, bad = [1, 2, 3, 4], [1, 2, 200, 4]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(str(tmp_path), **HALF, **device) as llm:
        alone = llm.generate([good], params, use_tqdm=False)[0].outputs[0].token_ids
        with pytest.raises(RequestError, match="--dtype bfloat16"):
            llm.generate([bad], params, use_tqdm=False)
        with pytest.raises(RequestError, match="--dtype bfloat16"):
            llm.generate([good, bad, good], params, use_tqdm=False)
        assert llm.generate([good], params, use_tqdm=False)[0].outputs[0].token_ids == alone
    with LLM(str(tmp_path), **{**OPTIONS, "dtype": "bfloat16"}) as llm:
        assert len(llm.generate([bad], params, use_tqdm=False)[0].outputs[0].token_ids) == 8
