"""The linear kernels of few rows against their twin: every form, sizes that fill no tile, rows in other company."""

import pytest
import torch

from quire.ops import linear as ops
from quire.ops.linear import Config
from quire.ops.ref import linear as ref

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
DTYPES = (torch.float32, torch.float16) + ((torch.bfloat16,) if DEVICE == "cuda" else ())  # the interpreter's bf16 dot is wrong
VECTOR = Config(dot=False, block_n=4, block_k=32, warps=4)
DOT = Config(dot=True, block_n=8, block_k=16, warps=4, stages=2)
FORMS = ("linear", "linear_silu_mul", "norm_linear", "norm_linear_silu_mul")
EPS = 1e-5


@pytest.fixture(autouse=True)
def poisoned_outputs(monkeypatch):
    """What a kernel does not write stays NaN."""
    monkeypatch.setattr(torch, "empty", lambda *a, **kw: torch.full(a, torch.nan, **kw))
    monkeypatch.setattr(torch, "empty_like", lambda x: torch.full_like(x, torch.nan))


def random(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape) * scale).to(DEVICE, dtype)


def arguments(form: str, M: int, N: int, K: int, dtype: torch.dtype, residual: bool = True, bias: bool = False) -> list:
    rows = 2 * N if "silu" in form else N
    norm = [random(M, K, dtype=dtype) if residual else None, 1 + random(K, dtype=dtype, scale=0.1), EPS] if "norm" in form else []
    return [
        random(M, K, dtype=dtype), *norm, random(rows, K, dtype=dtype, scale=K**-0.5), random(rows, dtype=dtype) if bias else None
    ]  # fmt: skip


def check(form: str, args: list, cut: Config | None) -> None:
    found, expected = getattr(ops, form)(*args, cut=cut), getattr(ref, form)(*args)
    if "norm" in form:
        assert torch.equal(found[1], expected[1]), "the residual stream is exact: one addition, one rounding"
        found, expected = found[0], expected[0]
    assert found.dtype == expected.dtype
    tolerance = TOLERANCE[args[0].dtype]
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cut", [VECTOR, DOT], ids=["vector", "dot"])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_equals_its_twin(form, cut, dtype):
    check(form, arguments(form, 3, 16, 128, dtype), cut)


@pytest.mark.parametrize("cut", [VECTOR, VECTOR._replace(tiles=3), DOT], ids=["vector", "tiles", "dot"])
@pytest.mark.parametrize("form", FORMS)
def test_sizes_that_fill_no_tile_are_masked(form, cut):
    check(form, arguments(form, 2, 13, 72, torch.float32, bias=True), cut)


@pytest.mark.parametrize("cut", [VECTOR, DOT], ids=["vector", "dot"])
def test_the_first_norm_of_a_model_has_no_residual_to_add(cut):
    args = arguments("norm_linear", 2, 16, 64, torch.float32, residual=False)
    check("norm_linear", args, cut)
    assert ops.norm_linear(*args, cut=cut)[1] is args[0]


@pytest.mark.parametrize("rows, tiles", [(1, 2), (2, 3), (4, 4)])
def test_a_program_of_several_tiles_writes_each_of_them(rows, tiles):
    form = "norm_linear_silu_mul"
    check(form, arguments(form, rows, 24, 64, torch.float32), VECTOR._replace(tiles=tiles))


@pytest.mark.parametrize("rows", [1, 16, 17, 64])
def test_the_dot_takes_up_to_sixty_four_rows(rows):
    check("norm_linear", arguments("norm_linear", rows, 8, 128, torch.float32), DOT)


@pytest.mark.parametrize("shape", [(1, 5, 576), (2, 6, 96), (5, 24, 192)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_default_cut_fits_any_shape(shape, dtype):
    for form in ("linear", "norm_linear_silu_mul"):
        check(form, arguments(form, *shape, dtype), None)


@pytest.mark.parametrize("cut", [VECTOR, DOT], ids=["vector", "dot"])
def test_logits_are_rounded_to_the_dtype_and_given_in_float32(cut):
    x, weight, _ = arguments("linear", 2, 24, 64, torch.float16)
    logits = ops.linear(x, weight, out_dtype=torch.float32, cut=cut)
    assert logits.dtype == torch.float32
    assert torch.equal(logits, ops.linear(x, weight, cut=cut).float())


@pytest.mark.parametrize("cut, rows", [(VECTOR, 4), (DOT, 16)], ids=["vector", "dot"])
@pytest.mark.parametrize("form", FORMS)
def test_a_row_does_not_depend_on_the_others(form, cut, rows):
    args = arguments(form, rows, 12, 64, torch.float16)
    alone = [a[rows - 1 :] if isinstance(a, torch.Tensor) and len(a) == rows else a for a in args]
    many, one = getattr(ops, form)(*args, cut=cut), getattr(ops, form)(*alone, cut=cut)
    for y, y1 in zip(*((r if isinstance(r, tuple) else (r,)) for r in (many, one)), strict=True):
        assert torch.equal(y[rows - 1 :], y1)


def test_a_value_that_is_not_finite_stays_in_its_row():
    x, weight, _ = arguments("linear", 3, 16, 64, torch.float32)
    x[1, 5] = torch.inf
    for cut in (VECTOR, DOT):
        y = ops.linear(x, weight, cut=cut)
        assert y[[0, 2]].isfinite().all() and not y[1].isfinite().any()


@pytest.mark.parametrize("K", [64, 576, 1024, 3072, 4096, 12288, 28672])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("gated", [False, True])
def test_default_tiles_are_powers_of_two_and_stay_in_registers(K, dtype, gated):
    for M in (1, 2, 4, 16, 64):
        for N in (24, 1024, 12288, 151936):
            cut = ops.config(M, N, K, dtype, gated, norm=True)
            assert all(size & (size - 1) == 0 and size > 0 for size in (cut.block_n, cut.block_k, cut.warps))
            if not cut.dot:
                registers = cut.block_n * K * dtype.itemsize * (1 + gated) // (cut.warps * 32 * 4)
                assert registers <= 112
                assert cut.block_n * cut.tiles * ops.PROGRAMS >= N or K > ops.MAX_TILED_K
