"""Triton's elementwise kernels against their torch twins; in Triton's interpreter where there is no GPU."""

import math

import numpy as np
import pytest
import torch
from tests.ops.codes import one_step_apart

from quire.ops.attention.triton import cache_view
from quire.ops.attention.triton_codes import as_bytes, values_view
from quire.ops.elementwise import reference as twin
from quire.ops.elementwise import triton as ops
from quire.ops.elementwise import triton_rope
from quire.ops.rounding.reference import FLOAT8

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter computes float32 and float16; bfloat16 is for the card.
DTYPES = [torch.float32, torch.bfloat16] if DEVICE == "cuda" else [torch.float32, torch.float16]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
FAR = 1 << 31  # elements
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2**-9, torch.bfloat16: 2**-6}


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal up to a rounding or two of the last place: sums may go in another order."""
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.fixture(autouse=True)
def poisoned_memory():
    """New tensors are filled with NaN, to show what a kernel forgets to write."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def test_fresh_outputs_are_poisoned() -> None:
    assert torch.empty(3, device=DEVICE).isnan().all() and torch.ones(3, device=DEVICE).new_empty(2, 3).isnan().all()


# ---- norm, activation, lookups ----


@dtypes
@pytest.mark.parametrize("width", [1, 15, 576, 1024, 8192, 8200, 20000])
@pytest.mark.parametrize("add", [False, True], ids=["", "residual"])
def test_rms_norm_is_its_twin(width: int, add: bool, dtype: torch.dtype) -> None:
    x, weight = randn(3, width + 3, dtype=dtype)[:, :width], randn(width, dtype=dtype)
    residual = randn(3, width, dtype=dtype) if add else None
    kept = x.clone(), residual if residual is None else residual.clone()
    normed, total = ops.rms_norm(x, weight, 1e-5, residual)
    expected, stream = twin.rms_norm(x, weight, 1e-5, residual)
    assert torch.equal(total, stream)
    close(normed, expected)
    assert torch.equal(x, kept[0]) and (residual is None or torch.equal(residual, kept[1]))


def test_a_row_of_zeros_is_normed_to_zeros() -> None:
    assert ops.rms_norm(torch.zeros(2, 64, device=DEVICE), randn(64), 1e-6)[0].eq(0).all()


@pytest.mark.parametrize("width", [576, 9000])
def test_a_row_is_normed_the_same_among_any_others(width: int) -> None:
    x, residual, weight = randn(40, width), randn(40, width), randn(width)
    together, _ = ops.rms_norm(x, weight, 1e-6, residual)
    for row in (0, 7, 39):
        alone, _ = ops.rms_norm(x[row : row + 1], weight, 1e-6, residual[row : row + 1])
        assert torch.equal(alone[0], together[row])


@dtypes
@pytest.mark.parametrize("width", [1, 17, 1024, 1536])
def test_silu_mul_is_its_twin(width: int, dtype: torch.dtype) -> None:
    x = 4 * randn(3, 2 * width, dtype=dtype)
    close(ops.silu_mul(x), twin.silu_mul(x))


def test_silu_of_extreme_values_stays_finite() -> None:
    x = torch.tensor([[-1e4, -200.0, -88.0, 0.0, 88.0, 200.0, 1e4, -0.0]], device=DEVICE)
    close(ops.silu_mul(torch.cat((x, torch.ones_like(x)), 1)), torch.nn.functional.silu(x))


@dtypes
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("width", [1, 576, 3000])
def test_embedding_and_gather_rows_copy_the_rows_that_are_named(
    width: int, ids_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    table, ids = randn(11, width, dtype=dtype), torch.tensor([10, 0, 3, 3], device=DEVICE, dtype=ids_dtype)
    assert torch.equal(ops.embedding(ids, table), twin.embedding(ids, table))
    assert torch.equal(ops.gather_rows(table, ids), twin.gather_rows(table, ids))


@pytest.mark.parametrize("module", [ops, twin], ids=["triton", "twin"])
def test_rows_are_gathered_into_a_buffer_that_is_given(module) -> None:
    x = randn(9, 200)[:, :160]
    idx = torch.tensor([8, 1], device=DEVICE)
    out = torch.full((2, 160), math.nan, device=DEVICE)
    assert module.gather_rows(x, idx, out=out) is out
    assert torch.equal(out, x[idx])


# ---- before attention ----


def inputs(T: int, H: int, K: int, D: int, rotary_dim: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """q, k and v as views of one projection's output; positions and slots in no order, every fifth token padding."""
    q, k, v = randn(T, H + 2 * K, D, dtype=dtype).split((H, K, K), 1)
    angle = torch.outer(torch.arange(50.0), 100.0 ** -(torch.arange(rotary_dim // 2) * 2 / rotary_dim)).to(DEVICE)
    positions = torch.randint(0, 50, (T,), device=DEVICE)
    slots = torch.randperm(6 * 16, device=DEVICE)[:T]
    slots[4::5], positions[4::5] = -1, 0
    cos_sin = torch.cat((angle.cos(), angle.sin()), 1)
    return {"q": q, "k": k, "v": v, "cos_sin": cos_sin, "positions": positions, "slots": slots}


def run(module, cache: torch.Tensor, x: dict[str, torch.Tensor], **options) -> tuple[torch.Tensor, ...]:
    """(q, k, v) as `rope_and_write` leaves them; what it is given stays as it is."""
    row = torch.cat((x["q"], x["k"], x["v"]), 1)
    q, k, v = row.split((x["q"].shape[1], x["k"].shape[1], x["v"].shape[1]), 1)
    module.rope_and_write(q, k, v, x["cos_sin"], x["positions"], cache, x["slots"], **options)
    return q, k, v


def check_rope_and_write(x: dict[str, torch.Tensor], **options) -> None:
    K, D, dtype = x["k"].shape[1], x["k"].shape[2], x["k"].dtype
    expected_cache = torch.full((6, 2, 16, K, D), math.nan, dtype=dtype, device=DEVICE)
    # Each block is followed by one of another layer.
    memory = torch.full((6, 3, K, 16, D), math.nan, dtype=dtype, device=DEVICE)
    expected = run(twin, expected_cache, x, **options)
    actual = run(triton_rope, memory[:, :2].view(6, 2, 16, K, D), x, **options)
    for found, wanted in zip(actual, expected, strict=True):
        close(found, wanted)
    close(memory[:, :2].transpose(2, 3), expected_cache)
    assert memory[:, 2].isnan().all()


@dtypes
@pytest.mark.parametrize("codes", [torch.int8, FLOAT8])
@pytest.mark.parametrize("how", ["own scales", "fixed scales", "a center"])
@pytest.mark.parametrize(("head_size", "rotary_dim"), [(64, 64), (96, 32)])
def test_keys_and_values_are_rounded_as_by_the_twin(
    head_size: int, rotary_dim: int, how: str, codes: torch.dtype, dtype: torch.dtype
) -> None:
    x, K = inputs(33, 9, 3, head_size, rotary_dim, dtype), 3
    fixed = (0.02, 0.004) if how == "fixed scales" else None
    center = 5 * randn(K, head_size) if how == "a center" else None
    found = []
    for module in (twin, triton_rope):
        cache = torch.zeros(6, 2 * 16 * K * head_size, dtype=torch.uint8, device=DEVICE).view(codes)
        scales = torch.full((6, 2 * 16 * K), math.nan, device=DEVICE)
        options = {"scales": scales.view(6, 2, 16, K), "fixed_scales": fixed, "key_center_KD": center}
        qkv = run(module, cache.view(6, 2, 16, K, head_size), x, **options)
        cache = as_bytes(cache.view(6, 2, 16, K, head_size))
        scales = scales.view(6, 2, 16, K)
        if module is triton_rope:  # in its own order
            keys = cache_view(cache)[:, 0].transpose(1, 2)
            cache = torch.stack((keys, values_view(cache).permute(0, 3, 1, 2)), 1)
            scales = scales.view(6, 2, K, 16).transpose(2, 3)
        found.append((*qkv, cache.contiguous().view(codes), scales))
    (q, k, v, cache, scales), (their_q, their_k, their_v, their_cache, their_scales) = found
    close(q, their_q)
    close(scales, their_scales)
    assert scales.isfinite().all(1).sum() == K * (x["slots"] >= 0).sum()
    assert one_step_apart(cache, their_cache) <= 0.01 * cache.numel()
    step = 32 if codes == FLOAT8 else 1
    for ours, theirs, half in ((k, their_k, 0), (v, their_v, 1)):
        largest = scales[:, half].nan_to_num().max().item()
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1.1 * step * largest)


@dtypes
@pytest.mark.parametrize("norm", [False, True], ids=["", "norm"])
@pytest.mark.parametrize("tokens", [1, 5, 33])
def test_rope_and_write_is_its_twin(tokens: int, norm: bool, dtype: torch.dtype) -> None:
    """Nine heads of 64 in two programs, three of k and of v in one; few and many tokens are launched differently."""
    norms = {"q_norm_D": randn(64, dtype=dtype), "k_norm_D": randn(64, dtype=dtype), "eps": 1e-6} if norm else {}
    check_rope_and_write(inputs(tokens, 9, 3, 64, 64, dtype), **norms)


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize(("head_size", "rotary_dim"), [(16, 16), (80, 80), (128, 128), (96, 32), (64, 62), (256, 256)])
@pytest.mark.parametrize("norm", [False, True], ids=["", "norm"])
def test_any_head_size_is_rotated_in_part_or_whole(
    norm: bool, head_size: int, rotary_dim: int, interleaved: bool
) -> None:
    norms = {"q_norm_D": randn(head_size), "k_norm_D": randn(head_size), "eps": 1e-3} if norm else {}
    check_rope_and_write(inputs(3, 6, 2, head_size, rotary_dim, torch.float32), interleaved=interleaved, **norms)


def test_heads_of_a_token_are_the_same_among_any_other_tokens() -> None:
    """Also where one token and many are launched differently."""
    x = inputs(40, 4, 2, 128, 128, torch.float32)
    norms = {"q_norm_D": randn(128), "k_norm_D": randn(128), "eps": 1e-6}
    caches = torch.zeros(2, 6, 2, 16, 2, 128, device=DEVICE)
    together = run(triton_rope, caches[0], x, **norms)
    for token in (0, 3, 39):
        only = {name: value if name == "cos_sin" else value[token : token + 1] for name, value in x.items()}
        alone = run(triton_rope, caches[1], only, **norms)
        assert all(torch.equal(a[0], b[token]) for a, b in zip(alone, together, strict=True))


def two_places(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two pieces of one memory of zeros, FAR elements apart. Only what is touched of it takes up memory."""
    if DEVICE == "cuda":
        memory = torch.zeros(FAR + size, dtype=torch.float16, device=DEVICE)
        return memory[:size], memory[FAR:]
    memory = np.zeros(FAR + size, np.float16)
    # As tensors of their own, because the interpreter copies all that a tensor spans.
    return torch.from_numpy(memory[:size]), torch.from_numpy(memory[FAR:])


def test_a_block_past_two_billion_elements_is_found() -> None:
    x = inputs(1, 4, 2, 128, 128, torch.float16)
    near, far = two_places(2 * 16 * 2 * 128)
    x["slots"][0] = 16 + 13
    _, k, v = run(triton_rope, near.as_strided((1, 2, 16, 2, 128), (FAR, 4096, 256, 128, 1)), x)
    assert torch.equal(far.view(2, 2, 16, 128)[:, :, 13], torch.cat((k, v))) and near.eq(0).all()


def test_a_row_past_two_billion_elements_is_found() -> None:
    near, far = two_places(64)
    far.copy_(torch.arange(64))
    table = near.as_strided((1, 64), (FAR, 1))
    ids = torch.tensor([1, 0], device=DEVICE, dtype=torch.int32)
    assert torch.equal(ops.embedding(ids, table), torch.stack((far, near)))


def test_a_step_without_tokens_launches_nothing() -> None:
    x = inputs(0, 4, 2, 64, 64, torch.float32)
    run(triton_rope, torch.zeros(6, 2, 16, 2, 64, device=DEVICE), x)
    assert ops.rms_norm(randn(0, 64), randn(64), 1e-6)[0].shape == ops.silu_mul(randn(0, 128)).shape == (0, 64)
    assert ops.gather_rows(randn(4, 64), torch.empty(0, dtype=torch.int64, device=DEVICE)).shape == (0, 64)
