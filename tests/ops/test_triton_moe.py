"""Routing and experts in Triton against their torch twins; in Triton's interpreter where there is no GPU."""

import itertools
import mmap

import pytest
import torch
from tests.ops.test_offsets import FAR, NO_RESERVE, Rows
from torch import Tensor

from quire.ops.moe import reference as twin
from quire.ops.moe import triton as moe
from quire.ops.moe.triton import Config, Tile
from quire.ops.routing import reference as twin_routing
from quire.ops.routing import triton as routing
from quire.ops.routing.reference import Routing

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16] if DEVICE == "cuda" else [torch.float32, torch.float16]
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
FEW = Config(0, Tile(16, 32, 4), Tile(32, 16, 4))
TILES = Config(16, Tile(32, 32, 4, 2), Tile(16, 32, 4, 2))
SWAPPED = Config(16, Tile(32, 32, 4, 2, swap=True), Tile(64, 16, 4, 2, swap=True))
BULK = Config(16, Tile(32, 32, 4, 2, bulk=True), Tile(16, 32, 4, 2, swap=True, bulk=True))
CUTS = {"few": FEW, "tiles": TILES, "swapped": SWAPPED, "bulk": BULK}
RULES = {
    "softmax": Routing(3),
    "renormalized": Routing(3, renormalize=True),
    "scaled": Routing(3, renormalize=True, scale=2.5),
    "sigmoid": Routing(5, score="sigmoid", renormalize=True),
    "best expert of a group": Routing(4, num_groups=4, num_groups_kept=2, scale=16.0),
    "best two of a group": Routing(4, "sigmoid", True, 2.5, num_groups=4, num_groups_kept=2, group_score_size=2),
}


@pytest.fixture(autouse=True)
def poisoned_memory():
    """New tensors are filled with NaN, or with ids of no expert, to show what a kernel forgets to write."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape).to(DEVICE, dtype)


# ---- routing ----


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("num_experts", [16, 20, 512], ids=lambda n: f"{n} experts")
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_every_rule_is_its_twin(rule: Routing, num_experts: int, bias: bool) -> None:
    logits = 2 * randn(3, num_experts + 3)[:, :num_experts]
    correction = randn(num_experts) if bias else None
    weights, ids = routing.route(logits, rule, correction)
    expected_weights, expected_ids = twin_routing.route(logits, rule, correction)
    assert weights.dtype == torch.float32 and ids.dtype == torch.int32 and torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected_weights, rtol=2e-5, atol=1e-7)


ROUTERS = [*itertools.product([1, 16, 17, 1030], [(8, 64), (40, 300), (128, 512)]), (1, (33, 4100)), (17, (33, 4100))]


@pytest.mark.parametrize(("num_tokens", "sizes"), ROUTERS)
def test_a_routers_logits_are_its_twins_in_parts(num_tokens: int, sizes: tuple[int, int]) -> None:
    num_experts, hidden_size = sizes
    x = randn(num_tokens, hidden_size + 8)[:, :hidden_size]
    weight, bias = randn(num_experts, hidden_size), randn(num_experts)
    found = routing.router_logits(x, weight, bias)
    part = 256 if hidden_size <= 4096 else 1024
    num_parts = -(-hidden_size // part) if num_tokens <= 1024 else 1
    assert found.dtype == torch.float32 and len(found) == num_parts
    torch.testing.assert_close(found.sum(0), twin_routing.router_logits(x, weight, bias)[0], rtol=1e-4, atol=1e-3)
    rule = Routing(4, renormalize=True)
    for a, b in zip(routing.route(found[:, -4:], rule), twin_routing.route(found[:, -4:], rule)):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=1e-7)


def test_a_routers_logits_do_not_depend_on_other_tokens() -> None:
    x, weight = randn(1030, 512), randn(64, 512)
    alone = routing.router_logits(x[7:8], weight)
    assert torch.equal(routing.router_logits(x[:40], weight)[:, 7:8], alone)
    among_many = routing.router_logits(x, weight)[:, 7:8]  # with other instructions
    torch.testing.assert_close(among_many.sum(0), alone.sum(0), rtol=1e-5, atol=1e-5)


def test_a_softmax_over_the_chosen_is_the_renormalized_one() -> None:
    logits = randn(7, 32)
    weights, ids = twin_routing.route(logits, Routing(4, renormalize=True))
    best, expected_ids = logits.topk(4)
    assert torch.equal(ids.long(), expected_ids)
    torch.testing.assert_close(weights, best.softmax(-1))


@pytest.mark.parametrize("route", [routing.route, twin_routing.route], ids=["triton", "torch"])
def test_of_equal_experts_the_first_are_taken(route) -> None:
    logits = torch.zeros(2, 12, device=DEVICE, dtype=torch.float16)
    logits[1, 7] = 1
    assert route(logits, Routing(3))[1].tolist() == [[0, 1, 2], [7, 0, 1]]


def test_whatever_the_logits_are_the_experts_exist_and_other_rows_are_well() -> None:
    """Rows that only fill up a recorded step may hold anything."""
    logits = randn(4, 20)
    expected = routing.route(logits, RULES["renormalized"])
    for bad in (torch.nan, torch.inf, -torch.inf):
        logits[1], logits[3, 5] = bad, bad
        for name in ("softmax", "best two of a group"):
            _, ids = routing.route(logits, RULES[name])
            assert (0 <= ids).all() and (ids < 20).all()
        weights, ids = routing.route(logits, RULES["renormalized"])
        assert torch.equal(ids[[0, 2]], expected[1][[0, 2]]) and torch.equal(weights[[0, 2]], expected[0][[0, 2]])


# ---- sorting ----


@pytest.mark.parametrize("num_tokens, num_experts", [(1, 3), (7, 5), (600, 20), (2049, 4), (4200, 4), (40_000, 4)])
def test_assignments_are_sorted_by_expert_and_cut_into_tiles(num_tokens: int, num_experts: int) -> None:
    ids = torch.randint(num_experts, (num_tokens, 2), dtype=torch.int32, device=DEVICE)
    ids[ids == 1] = 0  # one expert without assignments, and one with many
    plan = moe.sort_by_expert(ids, num_experts, 16)
    assert torch.equal(plan.order_A.long(), ids.flatten().argsort(stable=True))
    sizes = ids.flatten().bincount(minlength=num_experts).tolist()
    expected, first = [], 0
    for expert, size in enumerate(sizes):
        expected += [[expert, first + start, first + size] for start in range(0, size, 16)]
        first += size
    count, *tiles = plan.tiles.tolist()
    assert count == len(expected) <= plan.max_tiles
    assert [tiles[3 * i : 3 * i + 3] for i in range(count)] == expected


@pytest.mark.parametrize("A, num_experts", [(1, 8), (8, 8), (9, 8), (64, 8), (1000, 3)])
def test_there_are_tiles_enough_for_any_spread_and_few_to_spare(A: int, num_experts: int) -> None:
    plan = moe.sort_by_expert(torch.zeros(A, 1, dtype=torch.int32, device=DEVICE), num_experts, 16)
    most = 0  # the worst case: as many experts as possible have a single row, or a single row after full tiles
    for used in range(1, min(A, num_experts) + 1):
        full = (A - used) // 16
        most = max(most, used + full)
    assert most <= plan.max_tiles <= most + 1


# ---- experts ----


def arguments(
    T: int, K: int, E: int, D: int, F: int, dtype: torch.dtype, bias: bool = False, added: bool = False
) -> tuple[list, dict]:
    ids = torch.stack([torch.randperm(E)[:K] for _ in range(T)]).to(DEVICE, torch.int32)
    weights = torch.rand(T, K).to(DEVICE)
    positional = [
        randn(T, D, dtype=dtype),
        weights,
        ids,
        randn(E, 2 * F, D, dtype=dtype) * D**-0.5,
        randn(E, D, F, dtype=dtype) * F**-0.5,
    ]
    named = {
        "gate_up_bias_E2F": randn(E, 2 * F, dtype=dtype) if bias else None,
        "down_bias_ED": randn(E, D, dtype=dtype) if bias else None,
        "added_TD": randn(T, D, dtype=dtype) if added else None,
    }
    return positional, named


def check(positional: list, named: dict, cut: Config | None) -> None:
    found, expected = moe.experts(*positional, **named, cut=cut), twin.experts(*positional, **named)
    tolerance = TOLERANCE[positional[0].dtype]
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "name, T", [("few", 1), ("few", 3), ("tiles", 1), ("tiles", 35), ("swapped", 1), ("swapped", 35)]
)
def test_experts_are_their_twin(name: str, T: int, dtype: torch.dtype) -> None:
    check(*arguments(T, 2, 4, 64, 32, dtype), CUTS[name])


@pytest.mark.parametrize("activation", twin.ACTIVATIONS)
@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_every_activation_with_biases_and_something_to_add_to(cut: Config, activation: str) -> None:
    positional, named = arguments(3, 2, 4, 64, 32, torch.float32, bias=True, added=True)
    positional[0] *= 6  # past the limits of the clamped one
    check(positional, {**named, "activation": activation}, cut)


@pytest.mark.parametrize("D, F", [(40, 24), (72, 50), (33, 7)])
@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_sizes_that_fill_no_tile_are_masked(cut: Config, D: int, F: int) -> None:
    if F % 8 and cut is BULK:
        cut = cut._replace(gate_up=cut.gate_up._replace(bulk=D % 8 == 0), down=cut.down._replace(bulk=False))
    check(*arguments(2, 3, 5, D, F, torch.float32, bias=True), cut)


@pytest.mark.parametrize("T", [1, 2, 40])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_default_cut_fits(T: int, dtype: torch.dtype) -> None:
    check(*arguments(T, 2, 8, 80, 48, dtype, bias=True, added=True), None)


def test_weights_come_in_bulk_where_they_fill_tiles() -> None:
    for D, F, bulk in ((2048, 768, True), (2048, 770, False), (2880, 2880, False)):
        cut = moe.config(8192, 8, 128, D, F, torch.bfloat16)
        assert cut.block_m == 128 and cut.gate_up.bulk == cut.down.bulk == bulk


def test_no_rows_are_no_rows() -> None:
    positional, named = arguments(1, 2, 4, 64, 32, torch.float32)
    positional[:3] = (p[:0] for p in positional[:3])
    assert moe.experts(*positional, **named).shape == (0, 64)


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_a_row_does_not_depend_on_the_others(cut: Config) -> None:
    (x, weights, ids, *matrices), _ = arguments(12, 2, 4, 64, 16, torch.float16)
    x[5] = torch.nan  # in one expert with others
    together = moe.experts(x, weights, ids, *matrices, cut=cut)
    assert together[5].isnan().all() and together.isnan().any(1).sum() == 1
    for row in (0, 11):
        alone = moe.experts(x[row : row + 1], weights[row : row + 1], ids[row : row + 1], *matrices, cut=cut)
        assert torch.equal(alone[0], together[row])


def far_matrices(num_experts: int, *shape: int) -> tuple[Tensor, Tensor]:
    """(the matrices of all experts, as a kernel is given them; those of the last two).

    Without a GPU memory is reserved but not filled, the interpreter is told of the first expert only, and an offset
    that has wrapped around finds zeros.
    """
    if DEVICE == "cuda":
        near = whole = torch.empty(num_experts, *shape, dtype=DTYPES[1], device=DEVICE)
    else:
        size = shape[0] * shape[1]
        pages = mmap.mmap(-1, 2 * (FAR + num_experts * size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE)
        whole = torch.frombuffer(pages, dtype=DTYPES[1], offset=2 * FAR).view(num_experts, *shape)
        first = torch.frombuffer(pages, dtype=DTYPES[1], offset=2 * FAR, count=size).view(1, *shape)
        near = Rows(first, num_experts, size)
    whole[-2:] = randn(2, *shape, dtype=DTYPES[1]) * shape[1] ** -0.5
    return near, whole[-2:]


@pytest.mark.parametrize("few", [True, False], ids=["few", "tiles"])
def test_experts_past_2_to_the_31_elements_are_found(few: bool) -> None:
    D, F = 256, 128
    num_experts = FAR // (D * F) + 2
    (gate_up, last_gate_up), (down, last_down) = far_matrices(num_experts, 2 * F, D), far_matrices(num_experts, D, F)
    x, weights = randn(1, D, dtype=DTYPES[1]), torch.rand(1, 2, device=DEVICE)
    ids = torch.tensor([[1, 0]], dtype=torch.int32, device=DEVICE)
    if few:
        cut = Config(0, Tile(64, 256, 4), Tile(128, 128, 4))
        found = moe.experts(x, weights, ids + num_experts - 2, gate_up, down, cut=cut)
    else:  # sorted as if there were only these two, because sorting has a program for each expert
        plan = moe.sort_by_expert(ids, 2, 16)
        tile = Tile(64, 64, 4, 2)
        plan.tiles[1::3] += num_experts - 2
        h, y = x.new_empty(2, F), x.new_empty(2, D)
        moe._grouped(h, x, gate_up, None, plan, tile, 2, "silu")
        moe._grouped(y, h, down, None, plan, tile, 2)
        found = (weights @ y.float()).to(x.dtype)
    expected = twin.experts(x, weights, ids, last_gate_up, last_down)
    tolerance = TOLERANCE[DTYPES[1]]
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


SHAPES = {
    "30B-A3B": (8, 128, 2048, 768),
    "8x7B": (2, 8, 4096, 14336),
    "lite": (6, 64, 2048, 1408),
    "671B": (8, 256, 7168, 2048),
    "20b": (4, 32, 2880, 2880),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_default_cuts_stay_within_registers_and_shared_memory(shape: tuple[int, int, int, int]) -> None:
    K, E, D, F = shape
    for T in (1, 2, 8, 16, 64, 256, 1024, 8192):
        block_m, *tiles = moe.config(T, K, E, D, F, torch.bfloat16)
        for (block_n, block_k, num_warps, num_stages, swap, _), gated in zip(tiles, (2, 1), strict=True):
            assert all(size & (size - 1) == 0 for size in (block_m, block_n, block_k, num_warps))
            if block_m:
                assert num_stages * 2 * block_k * (block_m + gated * block_n) <= 200 << 10
                assert block_m * block_n * gated / (num_warps * 32) <= 128
                assert block_n >= 64 if swap else block_m >= 64
            else:
                inputs, times = (D, 2) if gated == 2 else (F, K)
                chunks = -(-inputs // block_k)
                assert block_n * block_k * chunks * times * 2 / (num_warps * 32 * 4) <= 96


def test_few_rows_are_not_sorted_unless_they_share_experts() -> None:
    few = {T: moe.config(T, 8, 128, 2048, 768, torch.bfloat16).block_m == 0 for T in (1, 8, 9, 64)}
    assert few == {1: True, 8: True, 9: False, 64: False}
    assert [moe.config(T, 2, 8, 4096, 14336, torch.bfloat16).block_m for T in (1, 2, 3)] == [0, 0, 16]
