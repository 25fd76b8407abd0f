"""Mixtures of experts as published: fields of config.json and tensors that transformers' own saving does not write."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLM, SamplingParams
from quire.errors import BadModelFileError, UnsupportedModelError
from quire.models import ernie4_5_moe, glm4_moe, granitemoe, minimax_m2, mixtral, qwen2_moe
from tests.models.oracle import OPTIONS, PROMPTS, TOLERANCE, logprobs, oracle

GRANITE_IN_MEMORY = {
    "input_linear.weight": "experts.gate_up_proj",
    "output_linear.weight": "experts.down_proj",
    "router.layer": "router",
}


def error(model: torch.nn.Module, folder: Path) -> float:
    """The largest difference of a logprob over one prompt."""
    prompt = PROMPTS[-1]
    with LLM(str(folder), **OPTIONS) as llm:
        output = llm.generate([prompt], SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)[0]
    ours = torch.tensor([entry[token].logprob for entry, token in zip(output.prompt_logprobs[1:], prompt[1:])])
    truth = logprobs(model, prompt)[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    return (ours - truth).abs().max().item()


def rewrite(folder: Path, renames: dict[str, str], extra: dict[str, torch.Tensor]) -> None:
    path = folder / "model.safetensors"
    tensors = {}
    for name, tensor in load_file(path).items():
        for theirs, ours in renames.items():
            name = name.replace(theirs, ours)
        tensors[name] = tensor
    save_file(tensors | extra, path, {"format": "pt"})


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param(qwen2_moe.TINY, id="qwen2_moe: every other layer has the window"),
        pytest.param({**qwen2_moe.TINY, "max_window_layers": 1}, id="qwen2_moe: of the first one only"),
        pytest.param({**qwen2_moe.TINY, "use_sliding_window": False}, id="qwen2_moe: the window counts for nothing"),
        pytest.param(minimax_m2.TINY, id="minimax_m2: rotary_dim"),
        pytest.param(glm4_moe.TINY, id="glm4_moe: partial_rotary_factor"),
    ],
)
def test_a_config_as_published_is_read_as_transformers_reads_it(fields, tmp_path):
    model = oracle(fields, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert error(model, tmp_path) < TOLERANCE


@pytest.mark.parametrize(
    "fields, name",
    [(glm4_moe.TINY, "model.layers.3.eh_proj.weight"), (ernie4_5_moe.TINY, "model.mtp_linear_proj.0.weight")],
    ids=["glm4_moe", "ernie4_5_moe"],
)
def test_what_predicts_further_tokens_is_left_in_the_file(fields, name, tmp_path):
    model = oracle(fields, tmp_path)
    rewrite(tmp_path, {}, {name: torch.zeros(64, 128)})
    assert error(model, tmp_path) < TOLERANCE


def test_a_layer_that_is_one_too_many_is_refused_where_none_predicts(tmp_path):
    oracle(mixtral.TINY, tmp_path)
    rewrite(tmp_path, {}, {"model.layers.3.input_layernorm.weight": torch.zeros(64)})
    with pytest.raises(BadModelFileError, match=r"model\.layers\.3\.input_layernorm\.weight"):
        LLM(str(tmp_path), **OPTIONS)


@pytest.mark.parametrize(
    "fields, renames",
    [(mixtral.TINY, {"block_sparse_moe": "mlp"}), (granitemoe.TINY, GRANITE_IN_MEMORY)],
    ids=["mixtral", "granitemoe"],
)
def test_names_may_be_those_that_transformers_has_in_memory(fields, renames, tmp_path):
    model = oracle(fields, tmp_path)
    rewrite(tmp_path, renames, {})
    assert error(model, tmp_path) < TOLERANCE


def test_experts_with_an_activation_that_kernels_lack_are_refused(tmp_path):
    oracle({**mixtral.TINY, "hidden_act": "relu"}, tmp_path)
    with pytest.raises(UnsupportedModelError, match="experts with the activation 'relu' are not supported"):
        LLM(str(tmp_path), **OPTIONS)
