"""The kernel of a few rows on Hopper against its twins; nothing interprets it, so this needs such a card.

`test_compiled.py` compiles it without one.
"""

import pytest
import torch
from torch import Tensor

from quire.ops.elementwise.reference import silu_mul
from quire.ops.linear import reference, rows_hopper
from quire.ops.packed_linear import rows, words
from quire.ops.packed_linear.forms import Float8
from quire.ops.rounding.reference import FLOAT8
from quire.quant.kept.triton import fits_few_rows, float8_options
from quire.quant.plain import dense_gpu

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = pytest.mark.skipif(not IS_HOPPER, reason="needs a Hopper GPU")
PLAIN = (torch.bfloat16, torch.float16)
ROUNDED = ("float8 token", "float8 static", "float8 group")
SIZES = ((4096, 4096), (70, 576), (200, 2064))  # two of them fill no tile and no step
ROWS = (1, 2, 5, 8, 9, 16, 17, 32, 64)


@pytest.fixture(autouse=True)
def poisoned_outputs(monkeypatch):
    """What the kernel does not write stays NaN."""
    torch.manual_seed(0)
    monkeypatch.setattr(torch, "empty", lambda *a, **kw: torch.full(a, torch.nan, **kw))


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def plain(N: int, K: int, dtype: torch.dtype) -> Tensor:
    return random(N, K, dtype=dtype) * K**-0.5


def float8(N: int, K: int, rounds: str) -> words.WordWeight:
    block, scales = None, torch.rand(N, device="cuda") * 0.01 * K**-0.5
    if rounds == "float8 group":
        block, scales = (128, 128), torch.rand(-(-N // 128), -(-K // 128), device="cuda") * 0.01
    packed = words.pack(Float8((random(N, K) * 10).to(FLOAT8), scales, block, rounds, input_scale=0.01))
    assert packed is not None
    return packed


def check(found: Tensor, expected: Tensor) -> None:
    atol = (4e-3 if expected.dtype == torch.float16 else 2e-2) * expected.abs().max().item()
    torch.testing.assert_close(found, expected, atol=atol, rtol=0)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("N, K", SIZES)
@pytest.mark.parametrize("dtype", PLAIN)
def test_plain_weights_give_what_the_twin_gives(dtype, N, K, has_bias):
    weight, gate_up = plain(N, K, dtype), plain(2 * N, K, dtype)
    biases = (random(N, dtype=dtype), random(2 * N, dtype=dtype)) if has_bias else (None, None)
    for M in ROWS:
        x = random(M, K, dtype=dtype)
        check(rows_hopper.linear(x, weight, biases[0]), reference.linear(x, weight, biases[0]))
        check(rows_hopper.linear_silu_mul(x, gate_up, biases[1]), reference.linear_silu_mul(x, gate_up, biases[1]))


@pytest.mark.parametrize("dtype", PLAIN)
@pytest.mark.parametrize("N, K", [(4096, 4096), (192, 2064)])
@pytest.mark.parametrize("rounds", ROUNDED)
def test_rounded_inputs_times_float8_give_what_the_twin_gives(rounds, N, K, dtype):
    weight, gate_up = float8(N, K, rounds), float8(2 * N, K, rounds)
    bias = random(N, dtype=dtype)
    for M in ROWS:
        x = random(M, K, dtype=dtype)
        codes, scales = rows.round_rows(x, rounds, 0.01)
        given = {"scales": scales, "dtype": dtype}
        found = rows_hopper.linear(codes, weight.codes, bias, **float8_options(weight, **given))
        check(found, words.linear(x, weight, bias))
        found = rows_hopper.linear_silu_mul(codes, gate_up.codes, **float8_options(gate_up, **given))
        check(found, silu_mul(words.linear(x, gate_up)))


@pytest.mark.parametrize("rows_here", [2, 8, 16])
def test_a_row_does_not_depend_on_the_others(rows_here):
    x, weight = random(rows_here, 576), plain(192, 576, torch.bfloat16)
    expected = rows_hopper.linear(x, weight)
    for other in (0, rows_here - 1):
        changed = x.clone()
        changed[other] = torch.nan
        found = rows_hopper.linear(changed, weight)
        kept = [row for row in range(rows_here) if row != other]
        assert torch.equal(found[kept], expected[kept]) and found[other].isnan().all()


def test_logits_are_rounded_to_the_dtype_and_given_in_float32():
    x, weight = random(5, 576), plain(192, 576, torch.bfloat16)
    logits = rows_hopper.linear(x, weight, out_dtype=torch.float32)
    assert logits.dtype == torch.float32 and torch.equal(logits, rows_hopper.linear(x, weight).float())


def test_others_keep_what_it_cannot_take():
    x, weight = random(33, 1088), plain(4096, 1088, torch.bfloat16)
    assert rows_hopper.fits(x[:2], weight) and rows_hopper.fits(x[:32], weight)
    short = x[:, :1024].contiguous()
    assert rows_hopper.fits(short[:9], weight[:, :1024].contiguous())
    assert not rows_hopper.fits(short[:8], weight[:, :1024].contiguous())
    odd = x[:2, :1087].contiguous()
    for refused in (x[:1], x, x[:8:2], x[:2].float(), x[:2].cpu(), odd):
        assert not rows_hopper.fits(refused, weight[:, : refused.shape[1]])
    assert not rows_hopper.fits(x[:2], weight[:70])
    for M in (1, 2, 32, 33):
        check(dense_gpu.multiply(x[:M], weight, None, torch.float32), reference.linear(x[:M], weight).float())
    blocks = float8(8256, 576, "float8 group")
    codes, _ = rows.round_rows(random(33, 576), "float8 group")
    assert fits_few_rows(codes, blocks) and not fits_few_rows(codes[:, :560], blocks)
    assert fits_few_rows(codes, float8(8320, 576, "float8 group"), is_gated=True)
    assert not fits_few_rows(codes, float8(8256 + 32, 576, "float8 group"), is_gated=True)
