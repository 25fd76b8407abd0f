"""Paged attention, torch twin and compiled kernel, against a dense float64 softmax written here from the definition.

Unused blocks, unused slots and the output are filled with NaN, and block tables are scrambled, to show whatever is read
or left out by mistake.
"""

import math
from dataclasses import dataclass, replace
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ops.native_cache import write_kv
from torch import Tensor

from quire.ops.attention import cpu as native
from quire.ops.attention import reference as twin
from quire.ops.attention.reference import AttentionTables
from quire.ops.rounding.reference import FLOAT8, round_vectors

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Case:
    rows: tuple[tuple[int, int], ...]  # (queries of this step, tokens already cached before it)
    num_kv_heads: int = 2
    group: int = 3
    head_size: int = 32
    block_size: int = 16
    padding: int = 0  # elements between blocks
    window: int = 0
    learned_sinks: bool = False
    softcap: float = 0.0
    dtype: torch.dtype = torch.float32
    codes: torch.dtype | None = None  # the cache holds these, and scales


@dataclass
class World:
    """All keys and values of some requests, and the queries of their last tokens."""

    case: Case
    keys: list[Tensor]
    values: list[Tensor]
    queries: list[Tensor]
    sinks: Tensor | None

    @staticmethod
    def of(case: Case, seed: int = 0) -> "World":
        random = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=random).to(case.dtype)

        D, K = case.head_size, case.num_kv_heads
        lens = [n + before for n, before in case.rows]
        sinks = torch.randn(K * case.group, generator=random) if case.learned_sinks else None
        return World(
            case=case,
            keys=[normal(n, K, D) for n in lens],
            values=[normal(n, K, D) for n in lens],
            queries=[2 * normal(n, K * case.group, D) for n, _ in case.rows],
            sinks=sinks,
        )

    @property
    def options(self) -> dict:
        case = self.case
        return dict(scale=case.head_size**-0.5, window=case.window, softcap=case.softcap, sinks_H=self.sinks)

    def expected(self) -> Tensor:
        return torch.cat([self._dense(*row) for row in zip(self.queries, self.keys, self.values, strict=True)])

    def _dense(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        case, n = self.case, len(k)
        if case.codes is not None:
            (k, k_scales), (v, v_scales) = (round_vectors(x, case.codes) for x in (k, v))
            k, v = k.float() * k_scales[..., None], v.float() * v_scales[..., None]
        k, v = (x.double().repeat_interleave(case.group, 1) for x in (k, v))
        s = torch.einsum("qhd,khd->hqk", q.double(), k) / math.sqrt(case.head_size)
        if case.softcap:
            s = case.softcap * torch.tanh(s / case.softcap)
        query_pos, key_pos = torch.arange(n - len(q), n)[:, None], torch.arange(n)[None]
        hidden = key_pos > query_pos
        if case.window:
            hidden |= key_pos <= query_pos - case.window
        weights = s.masked_fill(hidden, -math.inf).exp()
        total = weights.sum(-1, keepdim=True)
        if self.sinks is not None:
            total = total + self.sinks.double().exp()[:, None, None]
        return torch.einsum("hqk,khd->qhd", weights / total, v)


def paged(ops: ModuleType, world: World, seed: int = 1, apart: bool = False) -> Tensor:
    """The same attention through a scrambled paged cache, with NaN wherever it is not used.

    `apart`: each query is a row of its own, and those of a request read the same blocks.
    """
    case, size = world.case, world.case.block_size
    random = torch.Generator().manual_seed(seed)
    num_blocks = [-(-len(k) // size) for k in world.keys]
    pool = torch.randperm(sum(num_blocks) + 3, generator=random).int()
    num_elements = 2 * size * case.num_kv_heads * case.head_size
    memory, cache, scales = caches(case, len(pool))
    table = torch.full((len(num_blocks), max(num_blocks) + 1), -1, dtype=torch.int32)
    taken = 0
    for row, (k, v, (n, before)) in enumerate(zip(world.keys, world.values, case.rows, strict=True)):
        table[row, : num_blocks[row]] = pool[taken : taken + num_blocks[row]]
        taken += num_blocks[row]
        pos = torch.arange(n + before)
        slots = table[row, pos // size].long() * size + pos % size
        (write_kv if ops is native else twin.write_kv)(cache, k.clone(), v.clone(), slots, scales)
        if case.window:  # blocks that no query sees any more have been freed
            for logical in range(max(0, before - case.window + 1) // size):
                memory[table[row, logical]] = 255
                table[row, logical] = -1
    starts = torch.tensor([0, *(n for n, _ in case.rows)]).cumsum(0).int()
    lens = torch.tensor([len(k) for k in world.keys]).int()
    tables = AttentionTables(starts, lens, table, size, max(n for n, _ in case.rows))
    if apart:
        nums = torch.tensor([n for n, _ in case.rows])
        before = (lens - nums).repeat_interleave(nums)
        place = torch.arange(int(nums.sum())) - starts[:-1].repeat_interleave(nums)
        all_starts = torch.arange(int(nums.sum()) + 1).int()
        tables = AttentionTables(all_starts, (before + place + 1).int(), table.repeat_interleave(nums, 0), size, 1)
    q = torch.cat(world.queries)
    # As a view of a fused row, as the layers pass it.
    fused = torch.cat((q.flatten(1), torch.full((len(q), 48), math.nan, dtype=case.dtype)), 1)
    q = fused[:, : q[0].numel()].view(q.shape)
    out = torch.full(q.shape, math.nan, dtype=case.dtype)
    num_bytes = num_elements * cache.itemsize + (0 if scales is None else scales[0].numel() * 4)
    assert (memory[:, num_bytes:] == 255).all()  # what lies between blocks was not written
    return ops.paged_attention(q, cache, tables, **world.options, scales=scales, out=out)


def caches(case: Case, num_blocks: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """(bytes of blocks with padding between, a cache in them, its scales if it has any), all NaN.

    Bytes of 255 are NaN in floats of 8, 16 and 32 bits, and -1 as integers.
    """
    shape = 2, case.block_size, case.num_kv_heads, case.head_size
    dtype = case.codes or case.dtype
    cache_bytes = math.prod(shape) * dtype.itemsize
    scales_bytes = 0 if case.codes is None else math.prod(shape[:3]) * 4
    num_padding = case.padding * (dtype.itemsize if case.codes is None else 4)
    memory = torch.full((num_blocks, cache_bytes + scales_bytes + num_padding), 255, dtype=torch.uint8)
    cache = memory.view(dtype)[:, : math.prod(shape)].unflatten(1, shape)
    if case.codes is None:
        return memory, cache, None
    scales = memory[:, cache_bytes : cache_bytes + scales_bytes].view(torch.float32)
    return memory, cache, scales.unflatten(1, shape[:3])


def test_the_compiled_kernel_is_what_these_tests_run() -> None:
    float32, bfloat16, float16 = torch.float32, torch.bfloat16, torch.float16
    assert native.supported(float32, float32, 64, 16) and native.supported(bfloat16, bfloat16, 128, 32)
    assert native.supported(bfloat16, torch.int8, 128, 32) and native.supported(float32, FLOAT8, 64, 16)
    assert not native.supported(float16, float16, 64, 16) and not native.supported(float32, float32, 64, 8)


row = st.tuples(st.integers(1, 70), st.sampled_from([0, 1, 15, 16, 17, 63, 64, 100, 300]))
cases = st.builds(
    Case,
    rows=st.lists(row, min_size=1, max_size=5).map(tuple),
    num_kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 3, 7, 8]),
    head_size=st.sampled_from([32, 48, 64, 80, 128, 256]),
    block_size=st.sampled_from([16, 32, 48]),
    padding=st.sampled_from([0, 1, 64, 1000]),
    window=st.sampled_from([0, 0, 1, 5, 16, 40, 129]),
    learned_sinks=st.booleans(),
    softcap=st.sampled_from([0.0, 0.0, 3.0, 30.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    codes=st.sampled_from([None, torch.int8, FLOAT8]),
)


@pytest.mark.parametrize("ops", [twin, native], ids=["twin", "native"])
@settings(max_examples=40, deadline=None)
@given(case=cases, seed=st.integers(0, 99))
def test_any_mix_of_rows_equals_dense_attention(ops: ModuleType, case: Case, seed: int) -> None:
    world = World.of(case, seed)
    torch.testing.assert_close(
        paged(ops, world).double(), world.expected(), rtol=0, atol=TOLERANCE[case.dtype], check_dtype=False
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("padding", [1, 32, 1024], ids=lambda n: f"{n} apart")
def test_blocks_that_lie_apart_give_the_same_bits(padding: int, dtype: torch.dtype) -> None:
    """Rows of prompts and single tokens: with AMX and with vectors."""
    world = World.of(Case(((70, 300), (1, 900), (1, 90), (40, 0)), head_size=64, block_size=32, dtype=dtype))
    apart = replace(world, case=replace(world.case, padding=padding))
    assert torch.equal(paged(native, apart), paged(native, world))


@settings(max_examples=15, deadline=None)
@given(block_size=st.integers(1, 9), head_size=st.integers(1, 9), seed=st.integers(0, 99))
def test_the_twin_takes_any_block_and_head_size_and_float64(block_size: int, head_size: int, seed: int) -> None:
    case = Case(((3, 11), (1, 4), (9, 0)), head_size=head_size, block_size=block_size, dtype=torch.float64)
    world = World.of(case, seed)
    torch.testing.assert_close(paged(twin, world), world.expected(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [((1, 2999),), ((700, 0),), ((1, 200),) * 20 + ((600, 100),), ((40, 1500), (1, 900))])
def test_long_contexts_are_split_and_tiled_right(rows: tuple, dtype: torch.dtype) -> None:
    world = World.of(Case(rows, num_kv_heads=3, head_size=64, dtype=dtype))
    for ops in (twin, native):
        torch.testing.assert_close(
            paged(ops, world).double(), world.expected(), rtol=0, atol=TOLERANCE[dtype], check_dtype=False
        )


@pytest.mark.parametrize("options", [{}, {"window": 50}, {"softcap": 20.0, "learned_sinks": True}], ids=str)
@pytest.mark.parametrize("chunk", [1, 7, 16, 333])
def test_chunks_and_other_rows_do_not_change_a_bit_in_float32(options: dict, chunk: int) -> None:
    case = Case(((640, 0),), num_kv_heads=3, head_size=64, **options)
    whole = World.of(case)
    alone = paged(native, whole)
    start = 640 - 3 * chunk if chunk < 100 else 0  # the last three chunks, each a row of its own beside the others
    spans = [(begin, min(640, begin + chunk)) for begin in range(start, 640, chunk)]
    together = replace(
        whole,
        case=replace(case, rows=tuple((end - begin, begin) for begin, end in spans)),
        keys=[whole.keys[0][:end] for _, end in spans],
        values=[whole.values[0][:end] for _, end in spans],
        queries=[whole.queries[0][begin:end] for begin, end in spans],
    )
    assert torch.equal(paged(native, together), alone[start:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"window": 50}, {"learned_sinks": True}], ids=str)
@pytest.mark.parametrize(("num_kv_heads", "group"), [(3, 3), (6, 1), (5, 7)])
def test_a_token_among_many_rows_gets_the_bits_it_gets_alone(
    num_kv_heads: int, group: int, options: dict, dtype: torch.dtype
) -> None:
    """Many rows are computed with several kv heads at once, few with one."""
    many = World.of(Case(tuple((1, 7 * i) for i in range(40)), num_kv_heads, group, 64, dtype=dtype, **options))
    together = paged(native, many)
    torch.testing.assert_close(together.double(), many.expected(), rtol=0, atol=TOLERANCE[dtype], check_dtype=False)
    for i in (0, 1, 9, 10, 39):
        alone = replace(
            many,
            case=replace(many.case, rows=many.case.rows[i : i + 1]),
            keys=many.keys[i : i + 1],
            values=many.values[i : i + 1],
            queries=many.queries[i : i + 1],
        )
        assert torch.equal(paged(native, alone)[0], together[i])


@pytest.mark.parametrize("options", [{}, {"window": 50}, {"learned_sinks": True}, {"codes": FLOAT8}], ids=str)
def test_a_requests_tokens_as_rows_of_their_own_get_the_same_bits(options: dict) -> None:
    """As drafts are verified. The rows beside them are another request's, at neighbouring positions too."""
    world = World.of(Case(((4, 300), (1, 304), (1, 305), (6, 700), (8, 11)), num_kv_heads=3, head_size=64, **options))
    together = paged(native, world, apart=True)
    assert torch.equal(together, paged(native, world))
    torch.testing.assert_close(together.double(), world.expected(), rtol=0, atol=2e-5, check_dtype=False)


def test_thread_count_does_not_change_a_bit_in_float32() -> None:
    world = World.of(Case(((1, 1500), (20, 700)), num_kv_heads=1, head_size=64))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = paged(native, world)
        torch.set_num_threads(4)
        assert torch.equal(paged(native, world), one)
    finally:
        torch.set_num_threads(threads)


def test_torch_s_own_bf16_products_are_not_disturbed() -> None:
    """Both use AMX on the same threads, and torch remembers how it last configured the tiles."""
    a, b = torch.randn(200, 300).bfloat16(), torch.randn(300, 160).bfloat16()
    world = World.of(Case(((70, 300), (1, 90)), head_size=64, dtype=torch.bfloat16))
    product, attention = a @ b, paged(native, world)
    for _ in range(3):
        assert torch.equal(a @ b, product)
        assert torch.equal(paged(native, world), attention)


@pytest.mark.parametrize("ops", [twin, native], ids=["twin", "native"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_negative_slot_is_not_written(ops: ModuleType, dtype: torch.dtype) -> None:
    cache = torch.zeros(2, 2, 16, 1, 32, dtype=dtype)
    k = torch.ones(3, 1, 32, dtype=dtype)
    (write_kv if ops is native else twin.write_kv)(cache, k, k, torch.tensor([-1, 17, -5]))
    assert cache[0].count_nonzero() == 0 and cache[1].count_nonzero() == 64


@pytest.mark.parametrize("ops", [twin, native], ids=["twin", "native"])
def test_rows_without_queries_and_padding_tokens_are_left_alone(ops: ModuleType) -> None:
    cache = torch.ones(2, 2, 16, 1, 32)
    block_table = torch.tensor([[-1], [1], [-1]]).int()
    tables = AttentionTables(torch.tensor([0, 0, 1, 1]).int(), torch.tensor([0, 5, 9]).int(), block_table, 16, 1)
    out = torch.full((3, 2, 32), 7.0)
    ops.paged_attention(torch.ones(3, 2, 32), cache, tables, scale=1.0, out=out)
    torch.testing.assert_close(out[0], torch.ones(2, 32))
    assert (out[1:] == 7).all()


def test_offsets_beyond_two_gigabytes_are_reached() -> None:
    """The pool is virtual memory: only the touched pages exist."""
    num_blocks = 40_000  # of 64 KiB: 2.4 GiB
    cache = torch.empty(num_blocks, 2, 16, 8, 256, dtype=torch.uint8).view(torch.bfloat16)
    cache = torch.empty(0, dtype=torch.bfloat16).set_(cache.untyped_storage(), 0, (num_blocks // 2, 2, 16, 8, 256))
    k = torch.randn(1, 8, 256).bfloat16()
    last = num_blocks // 2 - 1
    tables = AttentionTables(torch.tensor([0, 1]).int(), torch.tensor([1]).int(), torch.tensor([[last]]).int(), 16, 1)
    write_kv(cache, k, k, torch.tensor([last * 16]))
    assert torch.equal(native.paged_attention(k, cache, tables, scale=1.0), k)
