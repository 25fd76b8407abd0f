"""The compiled argmax, top-k and Gumbel draw choose what their torch twins choose, to the last id."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quire.ops.sampling import gumbel
from quire.ops.vocab import cpu as native
from quire.ops.vocab import reference as vocab

WIDTHS = [1, 15, 16, 17, 255, 256, 5003, 49_152]


def equal(actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> bool:
    values, expected_values = (x[0].nan_to_num(nan=1e38) for x in (actual, expected))
    return torch.equal(actual[1], expected[1]) and torch.equal(values, expected_values)


def rows_of(kind: str, num_rows: int, width: int, seed: int) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    x = 3 * torch.randn(num_rows, width + 3, generator=random)[:, :width]  # strided
    if kind == "ties":
        x = x.round().abs() * torch.where(torch.rand(x.shape, generator=random) < 0.5, -1, 1)  # -0 and 0 among them
    if kind == "mostly forbidden":
        x = x.masked_fill(torch.rand(x.shape, generator=random) < 0.99, -torch.inf)
    if kind == "huge":
        x[:, width // 2] = 1e30
    return x


kinds = st.sampled_from(["plain", "ties", "mostly forbidden", "huge"])


def key(num_rows: int, seed: int) -> tuple[Tensor, ...]:
    random = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(high, (num_rows,), generator=random) for high in (2**62, 2**20, 100))


def test_the_compiled_kernels_are_what_these_tests_run() -> None:
    assert native.supported(torch.zeros(2, 3))
    assert not native.supported(torch.zeros(2, 3).bfloat16()) and not native.supported(torch.zeros(3, 2).T)


@settings(max_examples=60, deadline=None)
@given(
    kind=kinds, rows=st.integers(1, 5), width=st.sampled_from(WIDTHS), seed=st.integers(0, 999), nans=st.integers(0, 2)
)
def test_argmax_is_the_twins(kind: str, rows: int, width: int, seed: int, nans: int) -> None:
    x = rows_of(kind, rows, width, seed)
    for i in range(nans):
        x[0, (seed * 7 + i * 1009) % width] = torch.nan
    assert equal(native.row_argmax(x), x.max(-1))


@settings(max_examples=60, deadline=None)
@given(kind=kinds, width=st.sampled_from(WIDTHS), k=st.sampled_from([1, 2, 3, 64, 512, 4096]), seed=st.integers(0, 999))
def test_topk_is_the_twins(kind: str, width: int, k: int, seed: int) -> None:
    x = rows_of(kind, 3, width, seed)
    k = min(k, width)
    assert equal(native.row_topk(x, k), vocab.row_topk(x, k))


@settings(max_examples=60, deadline=None)
@given(
    kind=kinds,
    width=st.sampled_from(WIDTHS),
    temperature=st.sampled_from([1.0, 0.7, 0.01, 5.0]),
    seed=st.integers(0, 999),
)
def test_a_draw_is_the_twins(kind: str, width: int, temperature: float, seed: int) -> None:
    x = rows_of(kind, 7, width, seed)
    temperatures = torch.full((7,), temperature)
    expected = gumbel.gumbel_argmax(x / temperature, *key(7, seed))
    assert torch.equal(native.gumbel_argmax(x, temperatures, *key(7, seed)), expected)


@pytest.mark.parametrize("scale", [0.0, 1.0, 4.0])
def test_many_draws_are_the_twins(scale: float) -> None:
    """In 200,000 draws, some scores are so close that the kernel leaves the row to the twin."""
    row, temperatures = scale * torch.randn(300), torch.full((20_000,), 0.9)
    for seed in range(10):
        drawn = native.gumbel_argmax(row.expand(20_000, -1), temperatures, *key(20_000, seed))
        parts = _parts(key(20_000, seed))
        expected = torch.cat([gumbel.gumbel_argmax(row.expand(500, -1) / 0.9, *part) for part in parts])
        assert torch.equal(drawn, expected)


def _parts(columns: tuple[Tensor, ...], size: int = 500) -> list[tuple[Tensor, ...]]:
    return list(zip(*(column.split(size) for column in columns), strict=True))


def test_scores_that_tie_are_left_to_the_twin() -> None:
    """The logits cancel the noise: every score is 0, up to the last bit."""
    columns = key(4, 0)
    words = gumbel.token_words(1000, torch.device("cpu"))
    logits = -gumbel._score(torch.zeros(4, 1000), words, gumbel.row_key(*columns))
    assert torch.equal(native.gumbel_argmax(logits, torch.ones(4), *columns), gumbel.gumbel_argmax(logits, *columns))


def test_rows_without_a_finite_logit_give_the_lowest_id() -> None:
    logits = torch.full((2, 100), -torch.inf)
    assert native.gumbel_argmax(logits, torch.ones(2), *key(2, 0)).tolist() == [0, 0]
    assert native.row_argmax(logits)[1].tolist() == [0, 0]


def test_threads_and_other_rows_do_not_change_a_choice() -> None:
    x, columns = rows_of("plain", 9, 5003, 0), key(9, 0)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(4)
        together = native.gumbel_argmax(x, torch.ones(9), *columns), native.row_topk(x, 64)[1], native.row_argmax(x)[1]
        torch.set_num_threads(1)
        for i in range(9):
            one = x[i : i + 1]
            own_key = (column[i : i + 1] for column in columns)
            drawn = native.gumbel_argmax(one, torch.ones(1), *own_key)
            alone = drawn, native.row_topk(one, 64)[1], native.row_argmax(one)[1]
            assert all(torch.equal(a[0], b[i]) for a, b in zip(alone, together, strict=True))
    finally:
        torch.set_num_threads(threads)
