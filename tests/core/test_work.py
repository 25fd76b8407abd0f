"""What a core that is one of several tells of its work: tokens that are left to compute, requests it has received."""

import random

import pytest

from quire.messages import Ready
from tests.core.harness import FULL, HYBRID, Core

SEVERAL = {"data_parallel_size": 2, "data_parallel_index": 1}


def test_tokens_count_until_a_step_has_computed_them():
    core = Core(**SEVERAL)
    core.add("a", list(range(40)), max_tokens=4)
    core.add("b", list(range(100, 110)), max_tokens=4)
    left = [core.engine.stats().num_to_compute]
    while core.engine.has_work:
        core.step()
        left.append(core.steps[-1].stats.num_to_compute)
    assert left[:5] == [50, 34, 18, 2, 0] and set(left[5:]) == {0}  # 16 tokens a step, and answers count for nothing
    assert core.steps[-1].stats.num_received == 2


def test_what_is_cached_is_not_to_be_computed():
    core = Core(**SEVERAL)
    core.add("a", list(range(30)), max_tokens=2)
    core.run()
    core.add("b", [*range(28), 99, 98], max_tokens=2)
    assert core.engine.stats().num_to_compute == 2


def test_choices_that_share_a_prompt_count_it_once():
    core = Core(**SEVERAL)
    core.add("a", list(range(30)), n=4, max_tokens=2)
    assert core.engine.stats().num_to_compute == 30
    assert core.engine.stats().num_received == 1


@pytest.mark.parametrize("seed", range(12))
def test_nothing_is_left_when_all_have_ended(seed):
    core = Core(HYBRID if seed % 3 else FULL, pipeline_depth=1 + seed % 2, num_gpu_blocks_override=40, **SEVERAL)
    core.random_traffic(random.Random(seed))
    stats = core.engine.stats()
    assert stats.num_to_compute == core.engine.scheduler.waiting.num_tokens == 0
    assert all(step.stats.num_to_compute >= 0 for step in core.steps)


def test_one_core_alone_tells_nothing():
    core = Core()
    core.add("a", list(range(40)), max_tokens=4)
    stats = core.engine.stats()
    assert stats.num_to_compute == stats.num_received == 0
    assert core.engine.prefixes() is None and core.engine.ready() == Ready(core.engine.kv.num_tokens)


def test_a_core_tells_the_size_of_the_blocks_it_tells_of():
    core = Core(HYBRID, **SEVERAL)
    ready = core.engine.ready()
    assert (ready.prefix_block, ready.hit_unit) == (4, core.engine.kv.hit_unit)
    core.add("a", list(range(20)), max_tokens=2)
    core.run()
    assert len(core.engine.prefixes().came) == 5 * 8 and core.engine.prefixes() is None
