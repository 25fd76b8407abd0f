"""Norm, activation and rotary kernels against transformers' own modules, and the compiled ones against their twins."""

import math
from types import ModuleType

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.ops.native_cache import write_kv
from transformers.models.cohere.modeling_cohere import apply_rotary_pos_emb as apply_interleaved
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from quire.ops.attention import cpu as native_attention
from quire.ops.attention import reference as twin_attention
from quire.ops.attention.reference import AttentionTables
from quire.ops.elementwise import cpu as native
from quire.ops.elementwise import reference as twin

both = pytest.mark.parametrize("ops", [twin, native], ids=["twin", "native"])
dtypes = st.sampled_from([torch.float32, torch.bfloat16])


def close(actual: torch.Tensor, expected: torch.Tensor, num_roundings: int = 1) -> None:
    """Equal up to roundings of the last place: a sum in another order may change a rounding, and that the next."""
    tolerance = num_roundings * 2**-7 if actual.dtype == torch.bfloat16 else 2e-6
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance / 10)


def test_the_compiled_kernels_are_what_these_tests_run() -> None:
    assert native.supported(torch.float32) and native.supported(torch.bfloat16) and not native.supported(torch.float16)


@both
@settings(max_examples=25, deadline=None)
@given(T=st.integers(1, 90), D=st.sampled_from([1, 15, 16, 64, 576, 1000]), dtype=dtypes, add=st.booleans())
@example(T=66, D=1000, dtype=torch.bfloat16, add=True)  # a sum on the border of two roundings
@example(T=66, D=1000, dtype=torch.bfloat16, add=False)
def test_rms_norm_is_llamas(ops: ModuleType, T: int, D: int, dtype: torch.dtype, add: bool) -> None:
    torch.manual_seed(T * D)
    x, residual = torch.randn(T, D + 3).to(dtype)[:, :D], torch.randn(T, D).to(dtype)
    norm = LlamaRMSNorm(D, eps=1e-5)
    norm.weight.data = torch.randn(D).to(dtype)
    kept = (x.clone(), residual.clone())
    normed, total = ops.rms_norm(x, norm.weight.data, 1e-5, residual if add else None)
    stream = x + residual if add else x
    assert torch.equal(total, stream)
    close(normed, norm(stream).detach(), num_roundings=2)  # before and after the product with the weight
    assert torch.equal(x, kept[0]) and torch.equal(residual, kept[1])


@both
@settings(max_examples=25, deadline=None)
@given(T=st.integers(1, 60), D=st.sampled_from([1, 17, 64, 576]), dtype=dtypes)
def test_sums_are_torchs(ops: ModuleType, T: int, D: int, dtype: torch.dtype) -> None:
    torch.manual_seed(T * D)
    x, y = torch.randn(T, D + 3).to(dtype)[:, :D], torch.randn(T, D).to(dtype)
    assert torch.equal(ops.add(x, y), x + y)


@both
@settings(max_examples=25, deadline=None)
@given(T=st.integers(1, 60), F=st.sampled_from([1, 17, 64, 1536]), dtype=dtypes)
def test_silu_mul_gates_the_second_half(ops: ModuleType, T: int, F: int, dtype: torch.dtype) -> None:
    torch.manual_seed(T * F)
    x = (4 * torch.randn(T, 2 * F)).to(dtype)
    close(ops.silu_mul(x), torch.nn.functional.silu(x[:, :F]) * x[:, F:])


def test_silu_of_extreme_values_stays_finite() -> None:
    x = torch.tensor([[-1e4, -200.0, -88.0, 0.0, 88.0, 200.0, 1e4, -0.0] * 4])
    out = native.silu_mul(torch.cat((x, torch.ones_like(x)), 1))
    torch.testing.assert_close(out, torch.nn.functional.silu(x), rtol=1e-6, atol=1e-30)


def fused_qkv(T: int, H: int, K: int, D: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """q, k and v as views of one projection's output."""
    qkv = torch.randn(T, (H + 2 * K) * D).to(dtype)
    return tuple(x.unflatten(1, (-1, D)) for x in qkv.split((H * D, K * D, K * D), 1))


def angles(rot_dim: int, num_positions: int = 200) -> torch.Tensor:
    frequencies = 10000.0 ** -(torch.arange(0, rot_dim, 2) / rot_dim)
    return torch.outer(torch.arange(num_positions).float(), frequencies)


@both
@settings(max_examples=40, deadline=None)
@given(
    T=st.integers(1, 40),
    D=st.sampled_from([16, 64, 80, 128]),
    part=st.sampled_from([1, 0.5]),
    interleaved=st.booleans(),
    dtype=dtypes,
)
def test_rope_is_transformers(
    ops: ModuleType, T: int, D: int, part: float, interleaved: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(T * D)
    q, k, v = fused_qkv(T, 6, 2, D, dtype)
    before = [x.clone() for x in (q, k, v)]
    rot_dim, positions = int(D * part), torch.randint(0, 200, (T,))
    angle = angles(rot_dim)
    cos_sin = torch.cat((angle.cos(), angle.sin()), 1)
    cache = torch.full((1, 2, 16, 2, D), math.nan, dtype=dtype)
    ops.rope_and_write(q, k, v, cos_sin, positions, cache, torch.full((T,), -1), interleaved)
    assert cache.isnan().all()
    angle = angle[positions]
    # Transformers in float32: ours rounds once, at the end.
    apply = apply_interleaved if interleaved else apply_rotary_pos_emb
    wide = angle.repeat_interleave(2, 1) if interleaved else angle.repeat(1, 2)
    rotated = apply(before[0][..., :rot_dim].float(), before[1][..., :rot_dim].float(), wide.cos(), wide.sin())
    for x, was, expected in zip((q, k), before, rotated, strict=False):
        close(x[..., :rot_dim], expected.to(dtype))
        assert torch.equal(x[..., rot_dim:], was[..., rot_dim:])
    assert torch.equal(v, before[2])


@settings(max_examples=40, deadline=None)
@given(
    T=st.integers(1, 70),
    first=st.integers(0, 31),
    D=st.sampled_from([16, 32, 64, 80]),
    block_size=st.sampled_from([16, 32]),
    dtype=dtypes,
    padding=st.sampled_from([0, 0, 0.1]),
)
def test_rope_and_write_is_rope_then_write(
    T: int, first: int, D: int, block_size: int, dtype: torch.dtype, padding: float
) -> None:
    """Whole chunks of consecutive slots are written at once, others a token at a time."""
    torch.manual_seed(T * D)
    angle = angles(D)
    cos_sin, positions = torch.cat((angle.cos(), angle.sin()), 1), torch.arange(T)
    slots = first + positions
    slots[torch.rand(T) < padding] = -1
    fused = fused_qkv(T, 6, 2, D, dtype)
    copies = [x.clone() for x in fused]
    caches = [torch.full((7, 2, block_size, 2, D), math.nan, dtype=dtype) for _ in range(2)]
    native.rope_and_write(*fused, cos_sin, positions, caches[0], slots)
    native.rope_and_write(*copies, cos_sin, positions, caches[1], torch.full((T,), -1))
    for t in range(T):
        write_kv(caches[1], *(x[t : t + 1] for x in copies[1:]), slots[t : t + 1])
    assert all(torch.equal(a, b) for a, b in zip(fused, copies, strict=True))
    assert torch.equal(caches[0].view(torch.uint8), caches[1].view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("padding", [1, 32, 1024], ids=lambda n: f"{n} apart")
def test_blocks_that_lie_apart_are_written_as_others(padding: int, dtype: torch.dtype) -> None:
    """Whole chunks and single tokens; what lies between blocks is left alone."""
    torch.manual_seed(0)
    T, K, D, size, num_blocks = 43, 2, 80, 32, 5
    angle = angles(D)
    cos_sin, positions, slots = torch.cat((angle.cos(), angle.sin()), 1), torch.arange(T), 21 + torch.arange(T)
    slots[40] = -1
    qkv = fused_qkv(T, 6, K, D, dtype)
    close_by = torch.full((num_blocks, 2 * size * K * D), math.nan, dtype=dtype)
    apart = torch.full((num_blocks, 2 * size * K * D + padding), math.nan, dtype=dtype)
    for memory in (close_by, apart):
        cache = memory[:, : close_by.shape[1]].view(num_blocks, 2, size, K, D)
        native.rope_and_write(*(x.clone() for x in qkv), cos_sin, positions, cache, slots)
    assert close_by.isfinite().sum() == 2 * (T - 1) * K * D
    assert torch.equal(apart[:, : close_by.shape[1]].nan_to_num(), close_by.nan_to_num())
    assert apart[:, close_by.shape[1] :].isnan().all()


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_are_normed_before_they_are_rotated(ops: ModuleType, dtype: torch.dtype) -> None:
    """In bfloat16, results are rounded after the norm, after its weight, and after the rotation."""
    torch.manual_seed(0)
    T, D = 37, 80
    angle = angles(D)
    cos_sin, positions, slots = torch.cat((angle.cos(), angle.sin()), 1), torch.arange(T), torch.arange(T)
    qkv, weights = fused_qkv(T, 6, 2, D, dtype), [torch.randn(D).to(dtype) for _ in range(2)]
    expected = []
    for x, weight in zip(qkv, weights, strict=False):
        norm = LlamaRMSNorm(D, eps=1e-5)
        norm.weight.data = weight
        expected.append(norm(x).detach())
    twin.rope(*expected, cos_sin, positions)
    v = qkv[2].clone()
    cache = torch.full((4, 2, 16, 2, D), math.nan, dtype=dtype)
    ops.rope_and_write(*qkv, cos_sin, positions, cache, slots, q_norm_D=weights[0], k_norm_D=weights[1], eps=1e-5)
    for x, truth in zip(qkv, expected, strict=False):  # rotating adds what may cancel, so errors are absolute
        torch.testing.assert_close(x, truth, rtol=0, atol=2e-2 if dtype == torch.bfloat16 else 2e-6)
    written = torch.full_like(cache, math.nan)
    (write_kv if ops is native else twin_attention.write_kv)(written, qkv[1], v, slots)
    assert torch.equal(cache.view(torch.uint8), written.view(torch.uint8))


def test_threads_that_write_neighbouring_tokens_do_not_undo_each_other() -> None:
    """Two tokens of bfloat16 values share words.

    No token's slot directly follows that of the token before it, so that chunks are not written as a whole.
    """
    T, D = 512, 64
    k, v = (torch.randn(T, 3, D).bfloat16() for _ in range(2))
    slots = torch.cat((torch.arange(0, T, 2), torch.arange(1, T, 2)))
    order = torch.stack((torch.arange(T // 2) + T // 2, torch.arange(T // 2)), 1).flatten()  # slots 1, 0, 3, 2, …
    truth = torch.zeros(T // 16, 2, 16, 3, D, dtype=torch.bfloat16)
    for t in range(T):
        write_kv(truth, k[t : t + 1], v[t : t + 1], slots[t : t + 1])
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        for _ in range(50):
            for some in (torch.arange(T), order):  # neighbours far apart in the call, and side by side
                cache = torch.zeros_like(truth)
                write_kv(cache, k[some].contiguous(), v[some].contiguous(), slots[some].contiguous())
                assert torch.equal(cache, truth)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("codes", [None, torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_of_native_kernels_gives_what_a_layer_of_twins_gives(
    dtype: torch.dtype, codes: torch.dtype | None
) -> None:
    """Rounded keys are moved by a center, too."""
    torch.manual_seed(0)
    T, D, size = 37, 64, 16
    angle = angles(D)
    cos_sin, positions = torch.cat((angle.cos(), angle.sin()), 1), torch.arange(T)
    block_table = torch.tensor([[3, 0, 2]]).int()
    tables = AttentionTables(torch.tensor([0, T]).int(), torch.tensor([T]).int(), block_table, size, T)
    slots = tables.block_table[0, positions // size].long() * size + positions % size
    qkv = fused_qkv(T, 6, 2, D, dtype)
    center = None if codes is None else torch.randn(2, D)
    out = []
    for ops, attention in ((twin, twin_attention), (native, native_attention)):
        q, k, v = (x.clone() for x in qkv)
        cache = torch.full((4, 2, size, 2, D), math.nan).to(codes or dtype)
        scales = None if codes is None else torch.zeros(4, 2, size, 2)
        ops.rope_and_write(q, k, v, cos_sin, positions, cache, slots, scales=scales, key_center_KD=center)
        out.append(attention.paged_attention(q, cache, tables, scale=D**-0.5, scales=scales))
    torch.testing.assert_close(out[0], out[1], rtol=0, atol=2e-2 if dtype == torch.bfloat16 else 2e-6)
