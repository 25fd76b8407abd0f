"""Kernels reach what lies past 2^31 elements in caches, tables, weights and logits, each compared with its twin.

On a GPU tensors really are that large. Elsewhere, in Triton's interpreter, memory is reserved but not filled, and as
much again before the tensor, so that an offset that has wrapped around reads zeros there instead of ending the process.
"""

import gc
import math
import mmap
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.ops.attention import reference as twin_attention
from quire.ops.attention import triton as attention
from quire.ops.attention.reference import AttentionTables
from quire.ops.blocks import triton as blocks
from quire.ops.elementwise import reference as twin_elementwise
from quire.ops.elementwise import triton as elementwise
from quire.ops.elementwise.triton_rope import rope_and_write
from quire.ops.linear import reference as twin_linear
from quire.ops.linear import triton as linear
from quire.ops.mla import reference as twin_mla
from quire.ops.mla import triton as mla
from quire.ops.sampling import reference as twin_sampling
from quire.ops.sampling import triton as sampling

ON_A_CARD = torch.cuda.is_available()
DEVICE = "cuda" if ON_A_CARD else "cpu"
DTYPE = torch.bfloat16 if ON_A_CARD else torch.float16
TOLERANCE = dict(rtol=3e-2, atol=3e-2) if ON_A_CARD else dict(rtol=4e-3, atol=4e-3)
FAR = 1 << 31  # elements
NO_RESERVE = 0x4000  # MAP_NORESERVE, for which Python 3.11 has no name


@pytest.fixture(autouse=True)
def memory_is_given_back() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    gc.collect()
    if ON_A_CARD:
        torch.cuda.empty_cache()


class Far:
    """A tensor [rows, *shape] whose rows from `first` on lie past FAR elements.

    `whole` is what a kernel is given: in the interpreter only its first row, because that copies all that a tensor
    spans (launches do not depend on the number of rows). `end` is a tensor of its last `num_rows` rows.
    """

    def __init__(self, num_rows: int, *shape: int, dtype: torch.dtype = DTYPE) -> None:
        size = math.prod(shape)
        self.first = -(-FAR // size)
        count = self.first + num_rows
        if ON_A_CARD:
            self.whole = torch.empty(count, *shape, dtype=dtype, device=DEVICE)
            self.end = self.whole[self.first :]
        else:
            num_bytes = (FAR + count * size) * dtype.itemsize
            self.pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE)
            memory = np.frombuffer(self.pages, np.uint8)

            def rows(first: int, num_rows: int) -> Tensor:
                start = (FAR + first * size) * dtype.itemsize
                piece = memory[start : start + num_rows * size * dtype.itemsize]
                return torch.from_numpy(piece).view(dtype).view(num_rows, *shape)

            self.whole, self.end = rows(0, 1), rows(self.first, num_rows)
        self.end.copy_(torch.randn(self.end.shape).to(dtype))


class Rows:
    """A tensor of many rows to a kernel's wrapper, of which the interpreter sees only the first."""

    def __init__(self, first: Tensor, num_rows: int, row_stride: int) -> None:
        self.first, self.row_stride = first, row_stride
        self.shape = torch.Size((num_rows, *first.shape[1:]))

    def stride(self, dim: int | None = None) -> int | tuple[int, ...]:
        if dim is None:
            return self.first.stride()
        return self.row_stride if dim == 0 else self.first.stride(dim)

    def __getattr__(self, name: str):
        return getattr(self.first, name)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


# ---- the cache ----

K, D, SIZE = 2, 64, 16


@pytest.mark.parametrize("rows", [((1, 40), (1, 70)), ((20, 30), (9, 0))], ids=["decode", "prefill"])
def test_attention_finds_blocks(rows: tuple[tuple[int, int], ...]) -> None:
    far, lens = Far(8, 2, SIZE, K, D), [count + before for count, before in rows]
    assert far.first * far.whole.stride(0) >= FAR
    table = torch.randperm(8, device=DEVICE).int().view(2, 4).repeat(1, 2)  # of `end`
    starts = [0, *np.cumsum([count for count, _ in rows]).tolist()]
    tables = AttentionTables(ints(*starts), ints(*lens), table + far.first, SIZE, max(count for count, _ in rows))
    q_THD = torch.randn(starts[-1], 3 * K, D).to(DTYPE).to(DEVICE)
    found = attention.paged_attention(q_THD, far.whole, tables, scale=0.2)
    plain = attention.cache_view(far.end).transpose(2, 3).float()
    near = AttentionTables(ints(*starts), ints(*lens), table, SIZE, tables.max_query_len)
    expected = twin_attention.paged_attention(q_THD.float(), plain, near, scale=0.2)
    torch.testing.assert_close(found.float(), expected, **TOLERANCE)


def test_keys_and_values_are_written_to_blocks() -> None:
    far, T = Far(3, 2, SIZE, K, D), 5
    q, k, v = torch.randn(T, 6 + 2 * K, D).to(DTYPE).to(DEVICE).split((6, K, K), 1)
    cos_sin, positions = torch.randn(50, D, device=DEVICE), torch.randint(50, (T,), device=DEVICE)
    slots = torch.randperm(3 * SIZE, device=DEVICE)[:T]
    expected = attention.cache_view(far.end).transpose(2, 3).contiguous()
    given = (x.clone() for x in (q, k, v))
    twin_elementwise.rope_and_write(*given, cos_sin, positions, expected, slots)
    rope_and_write(q, k, v, cos_sin, positions, far.whole, slots + far.first * SIZE)
    torch.testing.assert_close(attention.cache_view(far.end).transpose(2, 3), expected, **TOLERANCE)


LATENT, ROPE = 64, 16


@pytest.mark.parametrize("rows", [((1, 40), (1, 70)), ((20, 30), (9, 0))], ids=["decode", "prefill"])
def test_latent_attention_finds_blocks(rows: tuple[tuple[int, int], ...]) -> None:
    far, lens = Far(8, SIZE, LATENT + ROPE), [count + before for count, before in rows]
    table = torch.randperm(8, device=DEVICE).int().view(2, 4).repeat(1, 2)  # of `end`
    starts = [0, *np.cumsum([count for count, _ in rows]).tolist()]
    tables = AttentionTables(ints(*starts), ints(*lens), table + far.first, SIZE, max(count for count, _ in rows))
    q_THL, q_THR = (torch.randn(starts[-1], 4, size).to(DTYPE).to(DEVICE) for size in (LATENT, ROPE))
    found = mla.latent_attention(q_THL, q_THR, far.whole, tables, scale=0.1)
    near = AttentionTables(ints(*starts), ints(*lens), table, SIZE, tables.max_query_len)
    expected = twin_mla.latent_attention(q_THL.float(), q_THR.float(), far.end.float(), near, scale=0.1)
    torch.testing.assert_close(found.float(), expected, **TOLERANCE)


def test_latents_are_written_to_blocks() -> None:
    far, T = Far(3, SIZE, LATENT + ROPE), 5
    q, kv, norm = (torch.randn(shape).to(DTYPE).to(DEVICE) for shape in ((T, 4, ROPE), (T, LATENT + ROPE), (LATENT,)))
    cos_sin, positions = torch.randn(50, ROPE, device=DEVICE), torch.randint(50, (T,), device=DEVICE)
    slots, expected = torch.randperm(3 * SIZE, device=DEVICE)[:T], far.end.clone()
    twin_mla.norm_rope_and_write(q.clone(), kv.clone(), norm, 1e-6, cos_sin, positions, expected, slots)
    mla.norm_rope_and_write(q, kv, norm, 1e-6, cos_sin, positions, far.whole, slots + far.first * SIZE)
    torch.testing.assert_close(far.end, expected, **TOLERANCE)


def test_blocks_are_copied_there_and_from_there() -> None:
    """They are copied in words of 4 bytes, of which 2-byte elements would need only half as many."""
    far = Far(4, 2, SIZE, K, D, dtype=torch.float32)
    near = torch.randn(3, 2, SIZE, K, D, device=DEVICE)
    source = far.end[2].clone()
    blocks.copy_blocks(near, far.whole, ints(1, far.first + 3).view(1, 2))
    blocks.copy_blocks(far.whole, near, ints(far.first + 2, 0).view(1, 2))
    assert torch.equal(far.end[3], near[1]) and torch.equal(near[0], source)


# ---- tables, weights and logits ----


@pytest.mark.parametrize(
    "lookup", [elementwise.embedding, lambda ids, x: elementwise.gather_rows(x, ids)], ids=["embedding", "gather"]
)
def test_lookups_find_rows(lookup) -> None:
    far = Far(4, 4096)
    ids = ints(2, 0, 3)
    assert torch.equal(lookup(ids + far.first, far.whole), far.end[ids.long()])


def test_a_gated_linear_layer_finds_the_second_half_of_its_weight() -> None:
    num_inputs, num_outputs = 4096, 8 if ON_A_CARD else 1
    x_MK = (torch.randn(1, num_inputs) / 64).to(DTYPE).to(DEVICE)
    far = Far(num_outputs, num_inputs)
    if ON_A_CARD:
        half = len(far.whole) // 2
        gate = far.whole[half - num_outputs : half].copy_(torch.randn(num_outputs, num_inputs))
        found = linear.linear_silu_mul(x_MK, far.whole)[:, -num_outputs:]
    else:  # a single program, of a layer with so many outputs that all of the second half lies far away
        gate = far.whole.copy_(torch.randn(1, num_inputs))
        found = torch.full((1, 1), math.nan, dtype=DTYPE)
        sizes = dict(M=1, K=num_inputs, BLOCK_N=1, BLOCK_K=1024)
        linear._linear_kernel[(1,)](x_MK, far.whole, None, found, far.first, **sizes, GATED=True, PDL=False)
    torch.testing.assert_close(found, twin_linear.linear_silu_mul(x_MK, torch.cat((gate, far.end))), **TOLERANCE)


VOCAB = 151_936 if ON_A_CARD else 2_503
STAGES = {
    "greedy": dict(temperature=0.0),
    "random": dict(temperature=0.8),
    "restricted": dict(temperature=0.8, top_p=0.9, top_k=50),
    "penalized": dict(temperature=0.8, repetition_penalty=1.5, presence_penalty=0.5),
}


@pytest.mark.parametrize("stage", STAGES)
def test_the_sampler_finds_logits(stage: str) -> None:
    """One row, after so many rows of padding that it begins past FAR; in the interpreter after one row, far away."""
    far = Far(1, VOCAB)
    flags = dict(random=stage != "greedy", restricted=stage == "restricted", penalized=stage == "penalized")
    far.end.mul_(3)
    logits = far.whole if ON_A_CARD else Rows(far.whole, 2, far.first * VOCAB)
    asked = dict(top_p=1.0, repetition_penalty=1.0, seed=7, prompt_len=4) | STAGES[stage]
    dtypes = [torch.float32] * 6 + [torch.int64] * 4
    values = [asked.get(name, 0) for name in twin_sampling.SamplerColumns._fields]
    columns = [torch.tensor([value], dtype=dtype, device=DEVICE) for value, dtype in zip(values, dtypes, strict=True)]
    columns = twin_sampling.SamplerColumns(*columns)
    tokens = torch.randint(VOCAB, (1, 20), dtype=torch.int32, device=DEVICE)
    positions = torch.full((logits.shape[0],), 9, device=DEVICE).int()
    rows, out = torch.full_like(positions, -1), torch.full_like(positions, -77)
    rows[-1] = 0
    expected, expected_tokens = out[-1:].clone(), tokens.clone()
    twin_sampling.sample(far.end, rows[-1:], positions[-1:], columns, expected_tokens, expected, **flags)
    scratch = sampling.Scratch(*logits.shape, DEVICE)
    sampling.sample(logits, rows, positions, columns, tokens, out, **flags, scratch=scratch)
    assert out[-1] == expected and torch.equal(tokens, expected_tokens) and out[:-1].eq(-1).all()
