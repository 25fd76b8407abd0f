"""A config.json that makes no sense is refused in one sentence."""

import json

import pytest

from quire import LLM, registry
from quire.errors import QuireError
from quire.models import llama, smollm3
from tests.models.oracle import OPTIONS

MIXTRAL, DEEPSEEK = (registry.literals("quire.models", "TINY")[name] for name in ("mixtral", "deepseek_v3"))
CASES = {
    "a list that is too short": {**smollm3.TINY, "no_rope_layers": [1]},
    "a string for a number": {**llama.TINY, "head_dim": "32"},
    "no size of the MLP": {**llama.TINY, "intermediate_size": None},
    "a negative size": {**llama.TINY, "intermediate_size": -96},
    "no such activation": {**llama.TINY, "hidden_act": "swoosh"},
    "a list of factors of another length": {
        **llama.TINY,
        "rope_scaling": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0] * 5, "factor": 2.0},
    },
    "a factor that is a word": {**llama.TINY, "rope_scaling": {"rope_type": "linear", "factor": "four"}},
    "more experts of a token than there are": {**MIXTRAL, "num_experts_per_tok": 9},
    "a word for an object": {**llama.TINY, "quantization_config": "mxfp4"},
    "groups that do not come out even": {**DEEPSEEK, "n_group": 3},
    "more experts than are believed": {**MIXTRAL, "num_local_experts": 10**9},
}


@pytest.mark.parametrize("fields", CASES.values(), ids=CASES)
def test_nonsense_is_refused_in_one_sentence(fields, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(QuireError) as error:
        LLM(str(tmp_path), **OPTIONS, load_format="dummy")
    assert "\n" not in str(error.value) and "Traceback" not in str(error.value)
