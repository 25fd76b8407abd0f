"""LongRoPE has two lists of divisors. Here: which one an engine takes, and how the first checkpoints spelled it."""

import json

import pytest

from quire import LLM, SamplingParams
from quire.models.phi3 import TINY
from tests.models.oracle import OPTIONS, PROMPTS, TOLERANCE, assert_greedy, largest_error, oracle


@pytest.mark.parametrize("name", ["su", "yarn"])
def test_a_config_of_the_first_checkpoints_is_understood(name, tmp_path):
    model = oracle({**TINY, "original_max_position_embeddings": 64}, tmp_path)
    scaling = {**TINY["rope_scaling"], "type": name}
    fields = {**TINY, "original_max_position_embeddings": 64, "rope_scaling": scaling}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert largest_error(model, tmp_path) < TOLERANCE


@pytest.mark.parametrize("max_model_len, list_name", [(64, "short_factor"), (65, "long_factor")])
def test_the_longest_context_an_engine_takes_decides_for_all(max_model_len, list_name, tmp_path):
    """So no request mixes keys of both lists, and cached prefixes fit every request. Transformers decides by each
    request's length, so here both of its lists are the one that we should take."""
    factors = TINY["rope_scaling"][list_name]
    scaling = {**TINY["rope_scaling"], "short_factor": factors, "long_factor": factors}
    model = oracle({**TINY, "original_max_position_embeddings": 64, "rope_scaling": scaling}, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**TINY, "original_max_position_embeddings": 64}))
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    with LLM(str(tmp_path), **{**OPTIONS, "max_model_len": max_model_len}) as llm:
        for prompt, output in zip(PROMPTS[:4], llm.generate(PROMPTS[:4], params, use_tqdm=False)):
            assert_greedy(model, prompt, output.outputs[0].token_ids)
