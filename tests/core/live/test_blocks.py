"""The map of blocks agrees with the pool, whatever happened to it, and looks at few blocks per update."""

import random

import pytest

from quire.core.live.blocks import NOBODY, NOT_LISTED, PoolMap
from quire.kv.pool import BlockPool
from quire.messages import Watch
from tests.core.harness import Core
from tests.core.live.test_view import shown


def swept(core: Core) -> dict:
    """The map, after all of it was looked at."""
    for _ in range(core.engine.live.blocks.pools[0].num_sweeps):
        (pool,) = shown(core)["kv"]["pools"]
    return pool


def in_cells(values: list[int], cell_blocks: int) -> list[list[int]]:
    return [values[start : start + cell_blocks] for start in range(1, len(values), cell_blocks)]


@pytest.mark.parametrize("num_blocks", [64, 401, 5001])
@pytest.mark.parametrize("seed", range(3))
def test_cells_are_those_of_the_pool_after_any_traffic(num_blocks, seed):
    core = Core(num_gpu_blocks_override=num_blocks, max_model_len=min(256, 4 * num_blocks - 8), max_num_seqs=8)
    core.engine.handle(Watch(True))
    rng = random.Random(seed)
    for idx in range(30):
        shared = [rng.randrange(3)] * rng.randrange(0, 60)
        core.add(f"r{idx}", shared + [rng.randrange(50) for _ in range(9)], max_tokens=rng.choice([1, 20, 80]))
        for _ in range(rng.randrange(12)):
            core.step()
        shown(core)
        if rng.random() < 0.3:
            core.abort(f"r{rng.randrange(idx + 1)}")
        if idx % 6 == 5:
            check(core)
    core.run()
    check(core)


def check(core: Core) -> None:
    pool = core.engine.kv.pools[0]
    found = swept(core)
    cells, size = found["cells"], found["cell_blocks"]
    held = in_cells(pool.ref_counts, size)
    content = in_cells([int(content is not None) for content in pool.content], size)
    assert cells["owned"] == [sum(count > 0 for count in cell) for cell in held]
    assert cells["cached"] == [
        sum(has_content and not count for count, has_content in zip(*cell)) for cell in zip(held, content)
    ]
    assert found["cached"] == sum(cells["cached"])
    assert found["owned"] == sum(cells["owned"]) + pool.num_limbo
    assert found["free"] + found["cached"] + found["owned"] == found["blocks"] == pool.num_blocks - 1
    tables = [set(request.blocks.tables[0]) for request in core.engine.scheduler.running]
    for cell, (owner, owned) in enumerate(zip(cells["owner"], cells["owned"])):
        assert (owner == NOBODY) == (owned == 0)
        if owner not in (NOBODY, NOT_LISTED):
            assert tables[owner] & set(range(1 + cell * size, 1 + (cell + 1) * size))


def test_large_cells_have_exact_owners_and_nearly_exact_contents():
    pool = BlockPool(100_001, lambda *_: None)
    blocks = pool.take_blocks(60_000)
    for block in blocks[:40_000]:
        pool.publish(block, 0, block.to_bytes(4, "little"))
    pool.let_go(blocks[:40_000:2] + blocks[20_001:40_000:2], None)  # half of the first 20,000, all of the next
    pool_map = PoolMap(pool, 400, [16])
    for number in (1, 2):
        pool_map.owners[1 + 30_000 * (number - 1) : 1 + 30_000 * number] = [number] * 30_000
    for _ in range(pool_map.num_sweeps):
        pool_map.sweep({1: 0, 2: 1})
    found = pool_map.shown(0.25)
    assert found["owned"] == sum(found["cells"]["owned"]) == 30_000
    assert found["cached"] == pytest.approx(30_000, rel=0.02)
    assert found["free"] + found["cached"] == 70_000
    owners = found["cells"]["owner"]
    assert set(owners[:80]) == {0} and set(owners[80:160]) == {NOBODY} and set(owners[160:240]) == {1}
    pool_map.sweep({2: 0})
    owners = pool_map.shown(0.25)["cells"]["owner"]
    assert set(owners[:80]) == {NOT_LISTED} and set(owners[160:240]) == {0}, "rows have changed"


@pytest.mark.parametrize("num_blocks", [64, 401, 6000, 100_001, 1_000_001])
def test_an_update_looks_at_few_blocks_and_few_cells(num_blocks):
    pool_map = PoolMap(BlockPool(num_blocks, lambda *_: None), 400, [16])
    unseen = pool_map.owned = [-1] * pool_map.num_cells
    pool_map.sweep({})
    assert -1 not in unseen, "the first time all of it is looked at"
    unseen[:] = [-1] * pool_map.num_cells
    for num_sweeps in range(1, pool_map.num_sweeps + 1):
        pool_map.sweep({})
        num_seen = pool_map.num_cells - unseen.count(-1)
        assert num_seen <= num_sweeps * 64 and num_seen * pool_map.cell_blocks <= num_sweeps * 8192
    assert -1 not in unseen
