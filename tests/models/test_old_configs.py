"""config.json files from before transformers wrote `layer_types` and nested `rope_parameters` mean the same."""

import json

import pytest
import torch

from quire import LLM, SamplingParams
from quire.models import cohere2, gemma2, gemma3, olmo3
from tests.models.oracle import OPTIONS, PROMPTS, TOLERANCE, logprobs, oracle

GEMMA3 = {key: value for key, value in gemma3.TINY.items() if key not in ("layer_types", "rope_parameters")}
OLD = {
    "gemma2": gemma2.TINY,
    "gemma3": {
        **GEMMA3,
        "num_hidden_layers": 4,
        "sliding_window_pattern": 3,
        "rope_theta": 500000.0,
        "rope_local_base_freq": 1000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "gemma3, defaults": {**GEMMA3, "num_hidden_layers": 7},
    "olmo3": olmo3.TINY,
    "cohere2": {**cohere2.TINY, "sliding_window_pattern": 2},
}


@pytest.mark.parametrize("fields", OLD.values(), ids=OLD)
def test_an_old_config_is_read_as_transformers_reads_it(fields, tmp_path):
    assert "layer_types" not in fields
    model = oracle(fields, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(fields))
    prompt = PROMPTS[-1]
    with LLM(str(tmp_path), **OPTIONS) as llm:
        output = llm.generate([prompt], SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)[0]
    ours = torch.tensor([entry[token].logprob for entry, token in zip(output.prompt_logprobs[1:], prompt[1:])])
    truth = logprobs(model, prompt)[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    assert (ours - truth).abs().max() < TOLERANCE
