"""A pipeline of stages: only the last knows the tokens it chooses; the first computes with what it was told."""

import random

import pytest

from quire.step import StepPlan
from tests.core.harness import FULL, HYBRID, Core, RecordingExecutor


class StagedExecutor(RecordingExecutor):
    """Checks that the first stage could compute every plan: by what it was told before the plan, and with it."""

    def __init__(self, config, specs) -> None:
        super().__init__(config, specs)
        self.told: dict[int, list[int]] = {}  # row -> tokens

    def forward(self, plan: StepPlan) -> None:
        for start in plan.new_rows:
            self.told[start.row] = list(start.token_ids)
        for forced in plan.forced:
            assert forced.start <= len(self.told[forced.row]), "tokens in between were never told"
            self.told[forced.row][forced.start :] = forced.token_ids
        drafts = {draft.row: len(draft.token_ids) for draft in plan.drafts}
        for row, start, count in zip(plan.rows, plan.starts, plan.num_tokens):
            assert start + count <= len(self.told[row]) + drafts.get(row, 0), "a token is not known to the first stage"
        super().forward(plan)


def staged(num_stages: int, specs=FULL, **options) -> Core:
    options = {"pipeline_depth": num_stages, **options}
    return Core(specs, executor=StagedExecutor, pipeline_parallel_size=num_stages, **options)


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_every_stage_has_a_step_when_there_are_requests_for_all(num_stages):
    core = staged(num_stages, max_num_seqs=8)
    for idx in range(8):
        core.add(str(idx), [idx, 2, 3], max_tokens=20)
    for _ in range(12):
        core.step()
    counts = [len(plan.rows) for plan in core.executor.plans[-num_stages:]]
    assert sum(counts) == 8 and max(counts) == -(-8 // num_stages)
    assert len(core.engine.pipeline.steps) == num_stages - 1  # the oldest was waited for
    core.run()
    core.assert_all_as_expected()
    core.assert_nothing_is_held()


@pytest.mark.parametrize("seed", range(60))
def test_whatever_happens_the_first_stage_knows_what_it_computes(seed):
    rng = random.Random(seed)
    num_stages = rng.choice([2, 3, 4])
    core = staged(
        num_stages,
        rng.choice([FULL, HYBRID]),
        pipeline_depth=rng.choice([1, 2, num_stages]),
        num_gpu_blocks_override=rng.choice([38, 44, 64]),
        max_num_batched_tokens=rng.choice([5, 9, 16]),
        enable_prefix_caching=rng.random() < 0.7,
        scheduling_policy=rng.choice(["fcfs", "priority"]),
        speculative_config={"method": "suffix", "num_speculative_tokens": 3} if rng.random() < 0.4 else None,
    )
    aborted = core.random_traffic(rng, predicts=seed % 3 == 0)
    core.assert_all_as_expected(but=aborted)
    core.assert_nothing_is_held()
