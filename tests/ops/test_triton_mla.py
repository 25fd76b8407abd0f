"""Latent attention in Triton against its twin, on scrambled block tables; what must not be read or written is NaN.

Without a GPU the kernels run in Triton's interpreter, which computes in float32 and float16 only.
"""

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from tests.ops.codes import one_step_apart
from torch import Tensor

from quire.ops.attention import work as work_lists
from quire.ops.attention.reference import AttentionTables
from quire.ops.attention.work import NUM_SPLITS, AttentionWork, Tile
from quire.ops.mla import reference as twin
from quire.ops.mla import triton as mla
from quire.ops.rounding.reference import FLOAT8

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * torch.cuda.is_available()
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
SMALL = Tile(16, 32, 4, 2, 4)
TALL = Tile(64, 32, 4, 2, 2)


@pytest.fixture(autouse=True)
def splits_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that also contexts short enough for the interpreter are split."""
    monkeypatch.setattr(work_lists, "MIN_CHUNK", 128)


@dataclass(frozen=True)
class Case:
    rows: tuple[tuple[int, int], ...]  # (queries of this step, tokens already cached before it)
    num_heads: int = 4
    latent_size: int = 64
    rope_size: int = 16
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    codes: torch.dtype | None = None  # the cache holds these, and scales
    tile: Tile = SMALL
    num_programs: int = 1  # more than there are tiles: long rows are split


class World:
    """A cache in padded blocks, and a step's queries: the latent part head by head, as a batched product leaves it."""

    def __init__(self, case: Case) -> None:
        self.case = case
        random = torch.Generator().manual_seed(0)
        H, L, R, size = case.num_heads, case.latent_size, case.rope_size, case.block_size
        lens = [n + before for n, before in case.rows]
        num_blocks = [-(-n // size) for n in lens]
        pool = torch.randperm(sum(num_blocks) + 3, generator=random).int()
        padded = torch.full((len(pool), size * (L + R) + 32), math.nan).to(case.codes or case.dtype)
        scales = None if case.codes is None else torch.full((len(pool), size + 4, 2), math.nan)[:, :size]
        cache = padded[:, : size * (L + R)].view(len(pool), size, L + R)
        # The r-th row of the step reads row 2r+1 of a table that is wider than needed.
        table = torch.full((2 * len(lens) + 1, max(num_blocks) + 5), -1, dtype=torch.int32)
        blocks = pool[: sum(num_blocks)].split(num_blocks)
        for r, (n, row_blocks) in enumerate(zip(lens, blocks, strict=True)):
            table[2 * r + 1, : len(row_blocks)] = row_blocks
            slots = torch.tensor([int(row_blocks[p // size]) * size + p % size for p in range(n)])
            twin.write_latent(cache, torch.randn((n, L + R), generator=random), slots, L, scales)
        self.cache = padded.to(DEVICE)[:, : size * (L + R)].view_as(cache)
        self.scales = None if scales is None else scales.to(DEVICE)
        starts = [0, *np.cumsum([n for n, _ in case.rows])]
        num_tokens = starts[-1] + 2  # two of padding
        self.q_THL = torch.randn((H, num_tokens, L), generator=random).to(case.dtype).to(DEVICE).transpose(0, 1)
        self.q_THR = torch.randn((num_tokens, H, R + 8), generator=random).to(case.dtype).to(DEVICE)[..., 8:]
        self.tables = AttentionTables(
            ints(starts),
            ints(lens),
            table.to(DEVICE),
            size,
            max(num_queries for num_queries, _ in case.rows),
            rows=ints([2 * r + 1 for r in range(len(lens))]),
        )

    def work(self, num_surplus: int = 0) -> AttentionWork:
        case, tables = self.case, self.tables
        num_tiles, group = mla.cut_heads(case.dtype, case.num_heads)
        starts, context_lens, rows = (t.cpu().numpy() for t in (tables.query_starts, tables.context_lens, tables.rows))
        units = work_lists.plan_units(
            starts[:-1],
            np.diff(starts),
            context_lens,
            rows,
            tile_m=case.tile.tile_m,
            group_size=group,
            num_kv_heads=num_tiles,
            window=0,
            num_programs=case.num_programs,
        )
        num_split = work_lists.max_split_units(len(units), num_kv_heads=num_tiles, num_programs=case.num_programs)
        padded = np.concatenate((units, np.zeros((num_surplus, 8), np.int32)))
        work = AttentionWork.of(torch.from_numpy(padded).to(DEVICE), case.tile, num_split, num_tiles, case.latent_size)
        work.partials.fill_(math.nan)
        work.stats.fill_(math.nan)
        return work

    def run(self, work: AttentionWork | None) -> Tensor:
        out = torch.full(self.q_THL.shape, math.nan, dtype=self.case.dtype, device=DEVICE)
        tables = replace(self.tables, work=(work,) if work else None)
        options = {"scale": self.scale, "scales": self.scales}
        mla.latent_attention(self.q_THL, self.q_THR, self.cache, tables, **options, out=out)
        assert out[-2:].isnan().all()  # padding tokens
        return out[:-2]

    @property
    def scale(self) -> float:
        return (self.case.latent_size + self.case.rope_size) ** -0.5

    def check(self, work: AttentionWork | None = None) -> None:
        cache = self.cache.float() if self.scales is None else self.cache
        q_THL, q_THR = self.q_THL.float(), self.q_THR.float()
        expected = twin.latent_attention(q_THL, q_THR, cache, self.tables, scale=self.scale, scales=self.scales)[:-2]
        torch.testing.assert_close(self.run(work).float(), expected, rtol=0, atol=TOLERANCE[self.case.dtype])


def ints(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


MIXED = ((1, 70), (8, 45), (1, 0), (2, 30))
CASES = {
    "mixed rows": Case(MIXED),
    "mixed rows in tall tiles": Case(MIXED, tile=TALL),
    "decode": Case(((1, 40), (1, 7), (1, 129))),
    "one chunk behind another": Case(((20, 20), (30, 0)), tile=TALL),
    "more heads than a tile has": Case(((1, 40), (3, 9)), num_heads=40),
    "heads that fill no tile": Case(((1, 40), (3, 9)), num_heads=10, dtype=torch.float16),
    "heads of two tiles": Case(((1, 40), (3, 9)), num_heads=80, dtype=torch.float16, tile=TALL),
    "blocks of 32": Case(MIXED, block_size=32),
    "blocks of 128": Case(((1, 200), (9, 3)), block_size=128, tile=TALL),
    "a rotated part of 8": Case(MIXED, latent_size=32, rope_size=8),
    "large latents": Case(((1, 50), (3, 3)), num_heads=16, latent_size=512, rope_size=64),
    "float16": Case(MIXED, dtype=torch.float16),
    "int8": Case(MIXED, codes=torch.int8),
    "float8 in tall tiles": Case(MIXED, tile=TALL, codes=FLOAT8),
    "float8 of float16": Case(MIXED, dtype=torch.float16, codes=FLOAT8),
}
SPLIT = ((1, 300), (2, 260), (1, 40))
SPLIT_CASES = {
    "decode": Case(((1, 399),), num_programs=16),
    "ragged rows": Case(SPLIT, num_programs=8),
    "ragged rows in tall tiles": Case(SPLIT, num_programs=8, tile=TALL),
    "more heads than a tile has": Case(SPLIT, num_heads=40, num_programs=24),
    "large latents": Case(((1, 290),), num_heads=16, latent_size=512, rope_size=64, num_programs=4),
    "float16": Case(SPLIT, dtype=torch.float16, latent_size=256, rope_size=32, num_programs=8),
    "float8": Case(SPLIT, codes=FLOAT8, num_programs=8),
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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [((1, 40), (1, 130)), ((9, 0), (1, 60))], ids=["decode", "prefill"])
def test_without_a_work_list_it_is_planned_on_the_spot_with_the_shipped_tiles(rows: tuple, dtype: torch.dtype) -> None:
    World(Case(rows, num_heads=16, dtype=dtype)).check()


def test_the_same_step_gives_the_same_bits() -> None:
    world = World(Case(((1, 400),), num_programs=16))
    work = world.work()
    assert torch.equal(world.run(work), world.run(work))  # the second in memory that the first has used


@pytest.mark.parametrize("num_heads", [1, 4, 16, 40, 71, 96, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_head_is_in_one_tile_that_its_config_has_room_for(num_heads: int, dtype: torch.dtype) -> None:
    num_tiles, group = mla.cut_heads(dtype, num_heads)
    assert num_tiles * group == num_heads
    assert all(group <= mla.config(dtype, 512, group, decode=decode).tile_m for decode in (True, False))


# ---- before attention ----


@pytest.mark.parametrize("codes", [None, torch.int8, FLOAT8])
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "neighbours"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_latents_are_normed_rotated_and_written_as_by_the_twin(
    dtype: torch.dtype, interleaved: bool, codes: torch.dtype | None
) -> None:
    random = torch.Generator().manual_seed(1)
    T, H, L, R, size = 5, 20, 64, 24, 16
    fused = torch.randn((T, H, R + 16), generator=random).to(dtype).to(DEVICE)
    kv = torch.randn((T, L + R + 8), generator=random).to(dtype).to(DEVICE)
    cache = torch.full((4, size, L + R), math.nan, device=DEVICE).to(codes or dtype)
    scales = torch.full((4, size, 2), math.nan, device=DEVICE)
    norm_L = torch.rand(L, generator=random).add(0.5).to(dtype).to(DEVICE)
    cos_sin = torch.randn((64, R), generator=random).to(DEVICE)
    positions = torch.tensor([3, 0, 63, 7, 9], device=DEVICE)
    slots = torch.tensor([37, 0, 63, -1, 16], device=DEVICE)
    ours = [x.clone() for x in (fused, kv, cache, scales)]
    theirs = [x.clone() for x in (fused, kv, cache, scales)]
    for module, (q, kv, cache, scales) in ((mla, ours), (twin, theirs)):
        options = {} if codes is None else {"scales": scales}
        place = cos_sin, positions, cache, slots, interleaved
        module.norm_rope_and_write(q[..., 16:], kv[:, 8:], norm_L, 1e-6, *place, **options)
    if codes is None:
        assert theirs[2].isfinite().all(2).sum() == 4  # slots written: all but the padding's
        for actual, expected in zip(ours, theirs, strict=True):
            torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE[dtype], equal_nan=True)
        return
    assert theirs[3].isfinite().all(2).sum() == 4
    torch.testing.assert_close(ours[0], theirs[0], rtol=0, atol=TOLERANCE[dtype])
    torch.testing.assert_close(ours[3], theirs[3], rtol=4 * TOLERANCE[dtype], atol=0, equal_nan=True)
    is_written = theirs[3].isfinite().all(2)
    differing = one_step_apart(ours[2][is_written], theirs[2][is_written])
    assert differing <= 0.02 * theirs[2][is_written].numel()
    step = theirs[3][is_written].max().item() * (32 if codes == FLOAT8 else 1)
    torch.testing.assert_close(ours[1], theirs[1], rtol=0, atol=step + TOLERANCE[dtype])


@pytest.mark.parametrize("sizes", [(24, 40), (512, 128)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 33, mla.FEW_TOKENS + 1])
def test_each_head_is_multiplied_by_its_own_matrix(sizes: tuple[int, int], dtype: torch.dtype, num_tokens: int) -> None:
    random = torch.Generator().manual_seed(1)
    K, N = sizes
    x = torch.randn((num_tokens, 3, K + 8), generator=random).to(dtype).to(DEVICE)[..., 8:]
    wide = torch.randn((3, K + N, max(K, N)), generator=random).div(K**0.5).to(dtype).to(DEVICE)
    for weight in (wide[:, :K, :N], wide[:, K:, :K].mT):  # in memory as those of keys, and as those of values
        expected = torch.einsum("thk,hkn->thn", x.double(), weight.double()).float()
        torch.testing.assert_close(mla.head_linear(x, weight).float(), expected, rtol=0, atol=TOLERANCE[dtype])
        torch.testing.assert_close(twin.head_linear(x, weight).float(), expected, rtol=0, atol=TOLERANCE[dtype])
