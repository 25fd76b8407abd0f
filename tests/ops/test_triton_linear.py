"""The linear kernels of one row and of few rows against their twin: both forms, sizes that fill no tile, rows among
other rows."""

import itertools

import pytest
import torch

from quire.ops.linear import reference as ref
from quire.ops.linear import triton, triton_rows
from quire.ops.linear.triton import Config
from quire.quant.plain import dense_gpu

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
DTYPES = (torch.float32, torch.float16) + ((torch.bfloat16,) if DEVICE == "cuda" else ())
FORMS = ("linear", "linear_silu_mul")
CUT = Config(block_n=4, block_k=32, warps=4)
ROWS_CUTS = [
    triton_rows.Config(block_n=16, block_k=32, parts=1, warps=4, stages=3),
    triton_rows.Config(block_n=16, block_k=64, parts=4, warps=4, stages=2),
]


@pytest.fixture(autouse=True)
def poisoned_outputs(monkeypatch):
    """What a kernel does not write stays NaN."""
    monkeypatch.setattr(torch, "empty", lambda *a, **kw: torch.full(a, torch.nan, **kw))


def arguments(form: str, M: int, N: int, K: int, dtype: torch.dtype = torch.float32, bias: bool = False) -> list:
    rows = 2 * N if form == "linear_silu_mul" else N
    args = [torch.randn(M, K), torch.randn(rows, K) * K**-0.5]
    if bias:
        args.append(torch.randn(rows))
    return [arg.to(DEVICE, dtype) for arg in args]


def check(form: str, args: list, cut: Config | triton_rows.Config | None) -> None:
    ops = triton if len(args[0]) == 1 else triton_rows
    found = getattr(ops, form)(*args, cut=cut)
    expected = getattr(ref, form)(*args)
    tolerance = TOLERANCE[args[0].dtype]
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_both_forms_of_one_row_equal_their_twin(form, dtype):
    check(form, arguments(form, 1, 16, 128, dtype), CUT)


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("cut", ROWS_CUTS, ids=["one part", "four parts"])
@pytest.mark.parametrize("rows", [2, 5, 8, 16])
@pytest.mark.parametrize("form", FORMS)
def test_both_forms_of_few_rows_equal_their_twin(form, rows, cut, dtype):
    check(form, arguments(form, rows, 40, 128, dtype), cut)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("N, K", [(13, 64), (16, 72), (1, 40)])
@pytest.mark.parametrize("form", FORMS)
def test_sizes_that_fill_no_tile_are_masked(form, N, K, bias):
    check(form, arguments(form, 1, N, K, bias=bias), CUT)
    for cut in ROWS_CUTS:
        check(form, arguments(form, 3, N, K, torch.float16, bias=bias), cut)


ONE_ROW = itertools.product([(1, 5, 576), (1, 27, 96), (1, 3, 5000)], DTYPES)
FEW_ROWS = itertools.product([(2, 70, 576), (9, 20, 2056)], DTYPES[1:])  # of float32 they are torch's


@pytest.mark.parametrize("shape, dtype", [*ONE_ROW, *FEW_ROWS])
@pytest.mark.parametrize("form", FORMS)
def test_the_default_cut_fits_any_shape(form, shape, dtype, monkeypatch):
    monkeypatch.setattr(triton, "MULTIPROCESSORS", 6)  # few outputs, and yet several per program
    check(form, arguments(form, *shape, dtype, bias=True), cut=None)


@pytest.mark.parametrize("rows, ops, cut", [(1, triton, CUT), (2, triton_rows, ROWS_CUTS[1])])
def test_logits_are_rounded_to_the_dtype_and_given_in_float32(rows, ops, cut):
    args = arguments("linear", rows, 24, 64, torch.float16, bias=True)
    logits = ops.linear(*args, out_dtype=torch.float32, cut=cut)
    assert logits.dtype == torch.float32
    assert torch.equal(logits, ops.linear(*args, cut=cut).float())


@pytest.mark.parametrize("cut", ROWS_CUTS, ids=["one part", "four parts"])
@pytest.mark.parametrize("form", FORMS)
def test_a_row_does_not_depend_on_the_others(form, cut):
    x, weight = arguments(form, 16, 12, 96, torch.float16)
    product = getattr(triton_rows, form)
    all_rows = product(x, weight, cut=cut)
    for rows in (2, 5, 8):
        assert torch.equal(product(x[:rows], weight, cut=cut), all_rows[:rows])
    x[1, 5] = torch.nan
    y = product(x, weight, cut=cut)
    others = [row for row in range(16) if row != 1]
    assert torch.equal(y[others], all_rows[others]) and y[1].isnan().all()


@pytest.mark.skipif(DEVICE == "cpu", reason="needs an NVIDIA GPU")
def test_torch_keeps_what_the_kernels_cannot_take():
    x, weight = arguments("linear", 17, 8, 64, torch.float16)
    assert triton.fits(x[:1], weight) and not triton_rows.fits(x[:1], weight)
    for rows in (2, 16):
        assert triton_rows.fits(x[:rows], weight) and not triton.fits(x[:rows], weight)
    odd = x[:2, :63].contiguous()
    for refused in (x, x[:8:2], x[:2].float(), x[:2].cpu(), odd):
        assert not triton.fits(refused, weight) and not triton_rows.fits(refused, weight[:, : refused.shape[1]])
    for rows in (1, 2, 16, 17):
        found = dense_gpu.multiply(x[:rows], weight, None, torch.float32)
        torch.testing.assert_close(found, ref.linear(x[:rows], weight).float(), atol=4e-3, rtol=4e-3)


@pytest.mark.parametrize("K", [64, 576, 1024, 3072, 4096, 12288, 28672])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("gated", [False, True])
def test_default_cuts_are_powers_of_two_and_stay_in_registers(K, dtype, gated):
    for N in (24, 1024, 12288, 151936):
        cut = triton.config(N, K, dtype, gated)
        assert all(size & (size - 1) == 0 and size > 0 for size in cut)
        registers = cut.block_n * K * dtype.itemsize * (1 + gated) // (cut.warps * 32 * 4)
        assert registers <= 112
