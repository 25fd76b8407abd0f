"""SamplingParams by vLLM's names: neutral values, values that stand for others, and what is refused."""

import msgspec
import pytest

from quire import RepetitionDetectionParams, RequestOutputKind, SamplingParams, StructuredOutputsParams
from quire.errors import RequestError


def test_values_that_stand_for_others():
    params = SamplingParams(extra_args=None, thinking_token_budget=-1, top_k=-1, logprobs=-1, logprob_token_ids=None)
    assert (params.extra_args, params.thinking_token_budget, params.top_k, params.logprobs) == ({}, None, 0, -1)
    assert SamplingParams(n=16_384, logprobs=100_000, prompt_logprobs=-1).n == 16_384
    assert SamplingParams(logprob_token_ids=(5, 5, 6)).logprob_token_ids == [5, 6]


def test_from_optional_takes_none_for_every_default():
    plain = SamplingParams()
    names = [name for name in SamplingParams.__struct_fields__ if name != "max_tokens"]
    assert SamplingParams.from_optional(**dict.fromkeys(names)) == plain
    assert SamplingParams.from_optional(max_tokens=None).max_tokens is None
    params = SamplingParams.from_optional(n=2, logit_bias={"5": 400.0, 6: -0.5})
    assert (params.n, params.logit_bias) == (2, {5: 100.0, 6: -0.5})
    with pytest.raises(RequestError, match="logit_bias"):
        SamplingParams.from_optional(logit_bias={"five": 1.0})


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 16_385},
        {"logprobs": -2},
        {"stream_interval": 0},
        {"thinking_token_budget": -2},
        {"output_kind": "delta"},
        {"logprob_token_ids": []},
        {"logprob_token_ids": list(range(129))},
        {"logprob_token_ids": [1, 2], "logprobs": 3},
        {"repetition_detection": {"max_pattern_size": 3, "min_count": 1}},
        {"repetition_detection": {"max_pattern_size": 1, "min_pattern_size": 2, "min_count": 2}},
        {"repetition_detection": {"size": 3}},
    ],
)
def test_what_makes_no_sense_is_refused_by_name(fields):
    with pytest.raises(RequestError, match=next(iter(fields))):
        SamplingParams(**fields)


def test_parameters_survive_the_way_to_the_core():
    params = SamplingParams(
        output_kind=RequestOutputKind.DELTA,
        repetition_detection=RepetitionDetectionParams(max_pattern_size=4, min_count=3),
        logprob_token_ids=[3],
        skip_reading_prefix_cache=True,
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


@pytest.mark.parametrize(
    ("tokens", "detection", "is_found"),
    [
        ([1, 2, 1, 2, 1, 2], (2, 2, 3), True),
        ([1, 2, 1, 2, 1, 2], (2, 2, 4), False),
        ([1, 2, 1, 2, 1, 3], (2, 1, 2), False),
        ([5, 5], (1, 0, 2), True),
        ([9, 1, 2, 3, 1, 2, 3], (8, 1, 2), True),
        ([9, 1, 2, 3, 1, 2, 3], (2, 1, 2), False),
        ([1, 1, 1, 1], (0, 0, 0), False),
    ],
)
def test_a_pattern_counts_when_the_last_tokens_are_nothing_else(tokens, detection, is_found):
    largest, smallest, count = detection
    assert RepetitionDetectionParams(largest, smallest, count).found([8, *tokens], len(tokens)) is is_found


def test_shapes_have_their_options():
    shape = StructuredOutputsParams(json_object=None, regex="a+", disable_any_whitespace=True, whitespace_pattern=None)
    assert shape.kind() == "regex"
    assert StructuredOutputsParams(json={}, whitespace_pattern=" ?").whitespace_pattern == " ?"
    with pytest.raises(RequestError, match="exclude each other"):
        StructuredOutputsParams(json={}, whitespace_pattern=" ?", disable_any_whitespace=True)
