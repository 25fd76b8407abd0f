"""Paged attention in Triton against its torch twin, on scrambled block tables; what must not be read or written is NaN.

Without a GPU the kernels run in Triton's interpreter, which computes in float32 and float16 only.
"""

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.layers.attention import triton as backend
from quire.ops.attention import reference as twin
from quire.ops.attention import triton as ops
from quire.ops.attention import work as work_lists
from quire.ops.attention.reference import AttentionTables
from quire.ops.attention.triton_codes import as_bytes, values_view
from quire.ops.attention.work import END_KEY, FIRST_UNIT, NUM_SPLITS, AttentionWork, Tile
from quire.ops.rounding.reference import FLOAT8, round_vectors

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def splits_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that also contexts short enough for the interpreter are split."""
    monkeypatch.setattr(work_lists, "MIN_CHUNK", 128)


DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * torch.cuda.is_available()
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
SMALL = Tile(16, 32, 4, 2, 4)
TALL = Tile(64, 32, 4, 2, 2)
LONG = Tile(16, 64, 4, 2, 4)


@dataclass(frozen=True)
class Case:
    rows: tuple[tuple[int, int], ...]  # (queries of this step, tokens already cached before it)
    num_kv_heads: int = 1
    group: int = 3
    head_size: int = 64
    block_size: int = 16
    window: int = 0
    learned_sinks: bool = False
    softcap: float = 0.0
    dtype: torch.dtype = torch.float32
    codes: torch.dtype | None = None  # the cache holds these, and scales
    tile: Tile = SMALL
    num_programs: int = 1  # more than there are tiles: long rows are split


class World:
    """A cache in head-major blocks, its copy in the twin's order, and a step's queries as part of fused rows."""

    def __init__(self, case: Case, seed: int = 0) -> None:
        self.case = case
        random = torch.Generator().manual_seed(seed)
        K, D, size = case.num_kv_heads, case.head_size, case.block_size
        H = K * case.group
        lens = [n + before for n, before in case.rows]
        num_blocks = [-(-n // size) for n in lens]
        pool = torch.randperm(sum(num_blocks) + 3, generator=random).int()
        plain = torch.full((len(pool), 2, size, K, D), math.nan, dtype=case.dtype)
        # The r-th row of the step reads row 2r+1 of a table that is wider than needed.
        table = torch.full((2 * len(lens) + 1, max(num_blocks) + 5), -1, dtype=torch.int32)
        taken = 0
        for r, (n, (_, before)) in enumerate(zip(lens, case.rows, strict=True)):
            first = max(0, before - case.window + 1) if case.window else 0
            for block in range(num_blocks[r]):
                kept = range(max(first, block * size), min(n, (block + 1) * size))
                if kept:  # else no query sees the block any more, and its entry is stale
                    table[2 * r + 1, block] = pool[taken]
                    values = torch.randn((2, len(kept), K, D), generator=random).to(case.dtype)
                    plain[pool[taken], :, [p % size for p in kept]] = values
                    taken += 1
        # Blocks are padded, as where groups of different layers share a pool.
        dtype = case.codes or case.dtype
        padded = torch.full((len(pool), 2 * size * K * D + 32), math.nan, device=DEVICE).to(dtype)
        self.cache = padded[:, : 2 * size * K * D].view(len(pool), 2, size, K, D)
        self.scales = None
        if case.codes is not None:
            codes, scales = round_vectors(plain, case.codes)
            plain = codes.float() * scales[..., None]
            memory = torch.full((len(pool), 2 * K * size + 8), math.nan, device=DEVICE)
            by_head = memory[:, : 2 * K * size].unflatten(1, (2, K, size))
            by_head.copy_(scales.transpose(2, 3))
            self.scales = by_head.view(len(pool), 2, size, K)
            bytes_of_cache, (keys, values) = as_bytes(self.cache), as_bytes(codes).unbind(1)
            ops.cache_view(bytes_of_cache)[:, 0].copy_(keys.transpose(1, 2))
            values_view(bytes_of_cache).copy_(values.permute(0, 2, 3, 1))
        else:
            ops.cache_view(self.cache).copy_(plain.transpose(2, 3))
        self.plain = plain.float().to(DEVICE)
        starts = [0, *np.cumsum([n for n, _ in case.rows])]
        self.num_tokens = starts[-1] + 2  # two of padding
        fused = torch.randn((self.num_tokens, H + 2 * K, D), generator=random).mul(2).to(case.dtype).to(DEVICE)
        self.q_THD = fused[:, :H]
        self.sinks_H = torch.randn(H, generator=random).to(DEVICE) if case.learned_sinks else None
        self.tables = AttentionTables(
            self.ints(starts),
            self.ints(lens),
            table.to(DEVICE),
            size,
            max(num_queries for num_queries, _ in case.rows),
            rows=self.ints([2 * r + 1 for r in range(len(lens))]),
        )

    @staticmethod
    def ints(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    def work(self, num_surplus: int = 0) -> AttentionWork:
        case, tables = self.case, self.tables
        card = dict(num_kv_heads=case.num_kv_heads, num_programs=case.num_programs)
        starts, context_lens, rows = (t.cpu().numpy() for t in (tables.query_starts, tables.context_lens, tables.rows))
        units = work_lists.plan_units(
            starts[:-1],
            np.diff(starts),
            context_lens,
            rows,
            tile_m=case.tile.tile_m,
            group_size=case.group,
            window=case.window,
            **card,
        )
        num_split_units = work_lists.max_split_units(len(units), **card)
        units = np.concatenate((units, np.zeros((num_surplus, 8), np.int32)))
        work = AttentionWork.of(
            torch.from_numpy(units).to(DEVICE), case.tile, num_split_units, case.num_kv_heads, case.head_size
        )
        work.partials.fill_(math.nan)
        work.stats.fill_(math.nan)
        return work

    def options(self) -> dict:
        case = self.case
        return dict(scale=case.head_size**-0.5, window=case.window, softcap=case.softcap, sinks_H=self.sinks_H)

    def run(self, work: AttentionWork | None) -> Tensor:
        out = torch.full(self.q_THD.shape, math.nan, dtype=self.case.dtype, device=DEVICE)
        tables = replace(self.tables, work=(work,) if work else None)
        ops.paged_attention(self.q_THD, self.cache, tables, **self.options(), scales=self.scales, out=out)
        assert out[-2:].isnan().all()  # padding tokens
        return out[:-2]

    def expected(self) -> Tensor:
        return twin.paged_attention(self.q_THD.float(), self.plain, self.tables, **self.options())[:-2]

    def check(self, work: AttentionWork | None = None) -> None:
        actual, expected = self.run(work).float(), self.expected()
        atol = TOLERANCE[self.case.dtype]
        if self.case.codes == FLOAT8 and self.case.dtype == torch.float16:
            atol *= 2  # two parts of a float8 have fewer digits
        torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


MIXED = ((1, 70), (8, 45), (1, 0), (2, 30))
CASES = {
    "mixed rows": Case(MIXED, num_kv_heads=2),
    "mixed rows in tall tiles": Case(MIXED, tile=TALL),
    "one query head per key head": Case(((1, 70), (70, 5)), group=1, tile=TALL),
    "seven query heads per key head": Case(((1, 70), (3, 9)), group=7),
    "more query heads than the lowest tile": Case(((1, 40), (2, 9)), group=20, tile=Tile(32, 32, 4, 2, 4)),
    "heads of 80": Case(MIXED, head_size=80),
    "heads of 96": Case(((1, 50), (9, 3)), head_size=96),
    "heads of 256": Case(((1, 50), (9, 3)), head_size=256),
    "heads of 512": Case(((1, 50), (9, 3)), head_size=512),
    "blocks of 32": Case(MIXED, block_size=32),
    "blocks of 128": Case(((1, 300), (9, 3)), block_size=128, tile=TALL),
    "soft cap": Case(MIXED, softcap=3.0),
    "learned sinks": Case(MIXED, num_kv_heads=2, learned_sinks=True, tile=TALL),
    "window": Case(MIXED, window=40),
    "window of one": Case(MIXED, window=1),
    "window in tall tiles": Case(((30, 100), (1, 90)), window=40, tile=TALL),
    "window shorter than a tile of queries": Case(((60, 20), (25, 100), (1, 90)), window=25, tile=TALL),
    "everything": Case(MIXED, window=33, learned_sinks=True, softcap=20.0),
    "float16": Case(MIXED, dtype=torch.float16),
    "float16 in tall tiles": Case(MIXED, dtype=torch.float16, tile=TALL),
    "int8": Case(MIXED, num_kv_heads=2, codes=torch.int8),
    "float8": Case(MIXED, num_kv_heads=2, codes=FLOAT8),
    "int8, everything": Case(MIXED, window=33, learned_sinks=True, softcap=20.0, codes=torch.int8, tile=TALL),
    "float8 of heads of 80, float16": Case(MIXED, head_size=80, block_size=32, dtype=torch.float16, codes=FLOAT8),
}
SPLIT = ((1, 300), (2, 260), (1, 40))
SPLIT_CASES = {
    "decode": Case(((1, 399),), num_kv_heads=2, num_programs=16, tile=LONG),
    "ragged rows": Case(SPLIT, num_programs=8),
    "ragged rows in tall tiles": Case(SPLIT, num_programs=8, tile=TALL),
    "heads of 80": Case(((1, 290),), head_size=80, num_programs=8, tile=LONG),
    "float16": Case(SPLIT, dtype=torch.float16, num_programs=8, tile=LONG),
    "learned sinks": Case(SPLIT, learned_sinks=True, num_programs=8, tile=LONG),
    "window": Case(SPLIT, window=300, num_programs=8, tile=LONG),
    "everything": Case(SPLIT, window=300, learned_sinks=True, softcap=20.0, num_programs=8),
    "int8": Case(SPLIT, num_programs=8, codes=torch.int8),
    "float8": Case(SPLIT, num_programs=8, tile=LONG, codes=FLOAT8),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_any_mix_of_rows_equals_the_twin(case: Case) -> None:
    world = World(case)
    work = world.work(num_surplus=3)
    assert (work.units[:, NUM_SPLITS] <= 1).all()
    world.check(work)


@pytest.mark.parametrize("case", SPLIT_CASES.values(), ids=SPLIT_CASES)
def test_long_rows_are_split_and_merged_by_the_last_to_arrive(case: Case) -> None:
    world = World(case)
    work = world.work(num_surplus=2)
    assert (work.units[:, NUM_SPLITS] > 1).sum() >= 3
    world.check(work)
    assert not work.counters.any()


@pytest.mark.parametrize("codes", [None, torch.int8, FLOAT8])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [((1, 40), (1, 130)), ((35, 0), (1, 60))], ids=["decode", "prefill"])
def test_without_a_work_list_it_is_planned_on_the_spot_with_the_shipped_tiles(
    rows: tuple, dtype: torch.dtype, codes: torch.dtype | None
) -> None:
    World(Case(rows, head_size=128, dtype=dtype, codes=codes)).check()


@pytest.mark.parametrize("case", [Case(((1, 30),) * 3), Case(((1, 500),), num_programs=16)], ids=["whole", "split"])
def test_the_same_step_gives_the_same_bits(case: Case) -> None:
    world = World(case)
    work = world.work()
    assert torch.equal(world.run(work), world.run(work))  # the second in memory that the first has used


def test_a_row_among_others_gets_the_bits_it_gets_alone_when_not_split() -> None:
    together = World(Case(MIXED))
    out = together.run(together.work())
    start = 9
    alone = World(Case(MIXED[2:3]))
    alone.cache, alone.q_THD = together.cache, together.q_THD[start : start + 3]
    alone.tables = replace(alone.tables, block_table=together.tables.block_table, rows=together.tables.rows[2:3])
    assert torch.equal(alone.run(alone.work())[0], out[start])


def supports(dtype: torch.dtype, head_size: int, block_size: int) -> bool:
    return backend.why_not(torch.device("cpu"), dtype, head_size, block_size, dtype) is None


def test_the_backend_takes_what_the_kernels_take() -> None:
    assert backend.BACKEND.paged_attention is ops.paged_attention
    assert supports(torch.bfloat16, 128, 16) and supports(torch.float32, 80, 64)
    assert not supports(torch.float64, 128, 16) and not supports(torch.bfloat16, 100, 16)


# ---- the plan ----


def plan(num_queries: list[int], context_lens: list[int], **options: int) -> np.ndarray:
    starts = np.concatenate(([0], np.cumsum(num_queries))).astype(np.int32)
    options = dict(tile_m=16, group_size=4, num_kv_heads=8, window=0, num_programs=528) | options
    return work_lists.plan_units(starts[:-1], np.diff(starts), np.array(context_lens, np.int32), None, **options)


def test_a_full_batch_is_not_split_and_one_long_row_is_spread_over_the_card() -> None:
    assert (plan([1] * 256, [1000] * 256)[:, 6] == 1).all()
    one = plan([1], [8192])
    assert len(one) == 64 and (one[:, 5] - one[:, 4] == 128).all()


def test_small_rests_are_not_split_off_and_splits_of_a_tile_are_about_equal() -> None:
    assert (plan([1] * 64, [520] * 64)[:, NUM_SPLITS] == 1).all()  # equal shares would be of 512 keys
    units = plan([1] * 3, [9000, 1000, 300], num_kv_heads=1, num_programs=16)
    assert (units[:, 5] - units[:, 4]).tolist() == [704] * 12 + [552, 512, 488, 300]


def test_the_longest_tiles_come_first() -> None:
    units = plan([1] * 100, [*range(1, 101)])
    assert (np.diff(units[:, END_KEY]) < 0).all()


def test_a_window_bounds_the_keys() -> None:
    units = plan([1, 8], [1000, 30], window=128)
    assert units[0, 4:6].tolist() == [872, 1000] and units[1, 4:6].tolist() == [0, 30]


@pytest.mark.parametrize("seed", range(20))
def test_a_plan_covers_every_query_and_key_once_and_is_no_longer_than_promised(seed: int) -> None:
    random = np.random.default_rng(seed)
    R = int(random.integers(1, 40))
    G, K = int(random.choice([1, 3, 4, 8])), int(random.choice([1, 2, 8, 600]))
    num_queries = random.choice([0, 1, 1, 1, 5, 200], R)
    context_lens = num_queries + random.choice([0, 10, 300, 9000], R)
    window, tile_m = int(random.choice([0, 100, 2000])), int(random.choice([16, 64, 128]))
    sizes = dict(tile_m=tile_m, group_size=G, num_kv_heads=K, num_programs=528)
    units = plan(num_queries.tolist(), context_lens.tolist(), window=window, **sizes)
    num_tokens = int(num_queries.sum())
    assert len(units) <= work_lists.max_units(num_tokens, R, **sizes)
    is_split = units[:, NUM_SPLITS] > 1
    room = work_lists.max_split_units(len(units), num_kv_heads=K, num_programs=528)
    assert is_split.sum() <= room and not is_split[room:].any() and not is_split[is_split.sum() :].any()

    starts = np.cumsum(num_queries) - num_queries
    seen = np.zeros(num_tokens, int)
    for first_unit in np.unique(units[:, FIRST_UNIT]):
        tile = units[units[:, FIRST_UNIT] == first_unit]
        row, first, count, pos = tile[0, :4]
        assert (tile[:, :4] == tile[0, :4]).all() and (tile[:, 6] == len(tile)).all()
        assert len(tile) <= max(1, 528 // K) and 0 < count <= tile_m // G
        assert units[first_unit : first_unit + len(tile)].tolist() == tile.tolist()
        assert tile[0, 4] == (max(0, pos - window + 1) if window else 0) and tile[-1, 5] == pos + count
        assert (tile[1:, 4] == tile[:-1, 5]).all() and (tile[:, 5] > tile[:, 4]).all()
        assert pos - (first - starts[row]) == context_lens[row] - num_queries[row]
        seen[first : first + count] += 1
    assert (seen == 1).all()
