"""The linear kernel of few rows against its twin: both forms, sizes that fill no tile, rows among other rows."""

import pytest
import torch

from quire.ops.linear import reference as ref
from quire.ops.linear import triton as ops
from quire.ops.linear.triton import Config

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
DTYPES = (torch.float32, torch.float16) + ((torch.bfloat16,) if DEVICE == "cuda" else ())
FORMS = ("linear", "linear_silu_mul")
CUT = Config(block_n=4, block_k=32, warps=4)


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


def check(form: str, args: list, cut: Config | None = CUT) -> None:
    found = getattr(ops, form)(*args, cut=cut)
    expected = getattr(ref, form)(*args)
    tolerance = TOLERANCE[args[0].dtype]
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 3, 4])
@pytest.mark.parametrize("form", FORMS)
def test_both_forms_equal_their_twin(form, rows, dtype):
    check(form, arguments(form, rows, 16, 128, dtype))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("N, K", [(13, 64), (16, 72), (1, 20)])
@pytest.mark.parametrize("form", FORMS)
def test_sizes_that_fill_no_tile_are_masked(form, N, K, bias):
    check(form, arguments(form, 2, N, K, bias=bias))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 5, 576), (4, 27, 96), (2, 3, 5000)])
@pytest.mark.parametrize("form", FORMS)
def test_the_default_cut_fits_any_shape(form, shape, dtype, monkeypatch):
    monkeypatch.setattr(ops, "MULTIPROCESSORS", 6)  # few outputs, and yet several per program
    check(form, arguments(form, *shape, dtype, bias=True), cut=None)


def test_logits_are_rounded_to_the_dtype_and_given_in_float32():
    args = arguments("linear", 2, 24, 64, torch.float16, bias=True)
    logits = ops.linear(*args, out_dtype=torch.float32, cut=CUT)
    assert logits.dtype == torch.float32
    assert torch.equal(logits, ops.linear(*args, cut=CUT).float())


@pytest.mark.parametrize("form", FORMS)
def test_a_row_does_not_depend_on_the_others(form):
    x, weight = arguments(form, 4, 12, 96, torch.float16)
    product = getattr(ops, form)
    alone = torch.cat([product(row, weight) for row in x.split(1)])
    for rows in (2, 3, 4):
        assert torch.equal(product(x[:rows], weight), alone[:rows])
    x[1, 5] = torch.nan
    y = product(x, weight)
    assert torch.equal(y[[0, 2, 3]], alone[[0, 2, 3]]) and y[1].isnan().all()


@pytest.mark.parametrize("K, rows", [(576, 4), (3072, 4), (3080, 2), (8192, 2), (8200, 1), (28672, 1)])
def test_more_inputs_are_worth_it_for_fewer_rows(K, rows):
    assert ops.max_rows(K) == rows


def test_torch_keeps_what_the_kernel_cannot_take():
    x, weight = arguments("linear", 4, 8, 64)
    assert ops.few_rows(x, weight) == (DEVICE == "cuda")
    wide = torch.cat([x, x])
    for refused in (wide, wide[::2], x.half(), x.cpu()):
        assert not ops.few_rows(refused, weight)


@pytest.mark.parametrize("K", [64, 576, 1024, 3072, 4096, 12288, 28672])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("gated", [False, True])
def test_default_cuts_are_powers_of_two_and_stay_in_registers(K, dtype, gated):
    for N in (24, 1024, 12288, 151936):
        cut = ops.config(N, K, dtype, gated)
        assert all(size & (size - 1) == 0 and size > 0 for size in cut)
        registers = cut.block_n * K * dtype.itemsize * (1 + gated) // (cut.warps * 32 * 4)
        assert registers <= 112
