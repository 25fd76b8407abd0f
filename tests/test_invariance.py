"""A request gives the same tokens whatever runs beside it: part of benchmarks/invariance.py, real weights, float32."""

import pytest
from benchmarks.invariance import CONDITIONS, Check

from tests.long import long_but


@pytest.fixture(scope="module")
def check(smollm2):
    check = Check(num_prompts=5, num_tokens=20)
    _, llm = check.run({})
    llm.close()
    return check


@pytest.mark.parametrize("condition", long_but(CONDITIONS, "depth 2, chunks of 7", "plain torch attention"))
def test_tokens_do_not_depend_on(condition, check):
    differing, llm = check.run(CONDITIONS[condition])
    llm.close()
    assert differing == 0


@pytest.mark.parametrize("depth", long_but([1, 2], 2))
def test_tokens_do_not_depend_on_preemption(depth, check):
    differing, preemptions = check.preempted({"pipeline_depth": depth})
    assert preemptions > 0
    assert differing == 0


def test_tokens_do_not_depend_on_prefix_hits(check):
    differing, cached = check.prefix_hits()
    assert cached > 0
    assert differing == 0
