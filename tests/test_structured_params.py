"""`structured_outputs` and `extra_args` of SamplingParams: what they take, and what they say of the rest."""

import pytest

from quire import SamplingParams, StructuredOutputs
from quire.errors import RequestError


def test_an_object_is_as_good_as_the_class():
    assert SamplingParams(structured_outputs={"regex": "a+"}).structured_outputs == StructuredOutputs(regex="a+")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("json", "Expected `object`"),
        ({"regex": 5}, "regex"),
        ({"whitespace_pattern": " " * 257, "json": {}}, "whitespace_pattern"),
        ([], "object"),
    ],
)
def test_what_it_cannot_be_is_refused_by_name(given, said):
    with pytest.raises(RequestError, match=f"structured_outputs: .*{said}"):
        SamplingParams(structured_outputs=given)


def test_extra_args_are_an_object():
    with pytest.raises(RequestError, match="extra_args"):
        SamplingParams(extra_args=5)
