"""The FlashAttention backend against the torch reference, with stand-ins that have the library's signatures and refuse
what it refuses.

What the stand-ins compute follows the library's documentation: causal, aligned to the bottom right corner; windows
include both their ends.
"""

import math
import sys
from dataclasses import dataclass, replace
from types import ModuleType

import pytest
import torch
from torch import Tensor

from quire.errors import ConfigError
from quire.layers.attention import flash_attn as backend
from quire.ops.attention import reference as twin
from quire.ops.attention.reference import AttentionTables
from quire.ops.attention.triton import cache_view

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MIXED = ((1, 40), (7, 0), (3, 300), (1, 0), (30, 5))


def dense(q_QHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, scale: float, window: tuple[int, int], softcap: float) -> Tensor:
    """One row; no key at all gives zeros."""
    num_queries, num_keys = len(q_QHD), len(k_NKD)
    k_NHD, v_NHD = (x.float().repeat_interleave(q_QHD.shape[1] // x.shape[1], 1) for x in (k_NKD, v_NKD))
    s_HQN = torch.einsum("qhd,nhd->hqn", q_QHD.float(), k_NHD) * scale
    s_HQN = softcap * torch.tanh(s_HQN / softcap) if softcap > 0 else s_HQN
    at_Q1 = torch.arange(num_queries, device=q_QHD.device)[:, None] + num_keys - num_queries
    at_1N = torch.arange(num_keys, device=q_QHD.device)[None]
    seen_QN = at_1N <= at_Q1
    if window[0] >= 0:
        seen_QN &= at_1N >= at_Q1 - window[0]
    p_HQN = s_HQN.masked_fill(~seen_QN, -math.inf).softmax(-1).nan_to_num(0.0)
    return torch.einsum("hqn,nhd->qhd", p_HQN, v_NHD).to(q_QHD.dtype)


def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    qv=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    page_table=None,
    cu_seqlens_q=None,
    cu_seqlens_k_new=None,
    max_seqlen_q=None,
    rotary_seqlens=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    rotary_interleaved=True,
    scheduler_metadata=None,
    num_splits=0,
    pack_gqa=None,
    sm_margin=0,
    return_softmax_lse=False,
):
    """Version 3."""
    assert causal and k is None and window_size[1] in (0, -1)
    assert q.stride(-1) == k_cache.stride(-1) == v_cache.stride(-1) == page_table.stride(-1) == 1
    assert cache_seqlens.dtype == page_table.dtype == cu_seqlens_q.dtype == torch.int32
    assert cache_seqlens.is_contiguous() and cu_seqlens_q.is_contiguous()
    assert k_cache.shape == v_cache.shape and len(cache_seqlens) == len(page_table) == len(cu_seqlens_q) - 1
    assert max_seqlen_q >= cu_seqlens_q.diff().max()
    out = torch.full(q.shape, math.nan, dtype=q.dtype, device=q.device)
    size = k_cache.shape[1]
    starts = cu_seqlens_q.tolist()
    for row, (start, end) in enumerate(zip(starts, starts[1:])):
        count = int(cache_seqlens[row])
        blocks = page_table[row, : -(-count // size)].long()
        keys, values = (x[blocks].flatten(0, 1)[:count] for x in (k_cache, v_cache))
        out[start:end] = dense(q[start:end], keys, values, softmax_scale, window_size, softcap)
    return out


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
):
    """Version 2."""
    assert k.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256"
    assert cu_seqlens_k.dtype == torch.int32 and cu_seqlens_k[0] == 0 and max_seqlen_k >= cu_seqlens_k.diff().max()
    return flash_attn_with_kvcache(
        q,
        k,
        v,
        cache_seqlens=cu_seqlens_k.diff(),
        page_table=block_table,
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=max_seqlen_q,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
    )


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch):
    """A function that makes only the named modules of the library importable."""

    def install_only(*names: str) -> None:
        for name in ("flash_attn_interface", "flash_attn"):
            monkeypatch.setitem(sys.modules, name, None)
        for name in names:
            module = ModuleType(name)
            module.flash_attn_varlen_func = flash_attn_varlen_func
            if name == "flash_attn_interface":  # version 2 has this function too, with other parameters
                module.flash_attn_with_kvcache = flash_attn_with_kvcache
            monkeypatch.setitem(sys.modules, name, module)
        backend._library.cache_clear()

    yield install_only
    backend._library.cache_clear()


@dataclass(frozen=True)
class Case:
    rows: tuple[tuple[int, int], ...] = MIXED  # (queries of this step, tokens cached before it)
    block_size: int = 16
    window: int = 0
    softcap: float = 0.0
    dtype: torch.dtype = torch.float16


class World:
    """A cache of head-major blocks with gaps between them, its copy in the reference's order, and a step's queries, cut
    from rows of q, k and v."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(0)
        K, H, D, size = 2, 6, 64, case.block_size
        lens = [count + before for count, before in case.rows]
        num_blocks = [-(-n // size) for n in lens]
        pool = torch.randperm(sum(num_blocks) + 2)
        # The r-th row of the step reads row 2r + 1 of a table that is wider than anyone needs.
        table = torch.full((2 * len(lens) + 1, max(num_blocks) + 3), -1, dtype=torch.int32)
        plain = torch.randn(len(pool), 2, size, K, D).to(case.dtype)
        for r, blocks in enumerate(pool[: sum(num_blocks)].split(num_blocks)):
            table[2 * r + 1, : len(blocks)] = blocks
        memory = torch.full((len(pool), 2 * size * K * D + 32), math.nan, dtype=case.dtype, device=DEVICE)
        self.cache = memory[:, : 2 * size * K * D].view(len(pool), 2, size, K, D)
        cache_view(self.cache).copy_(plain.transpose(2, 3))
        self.plain = plain.to(DEVICE)
        counts = torch.tensor([count for count, _ in case.rows])
        starts = [0, *counts.cumsum(0).tolist()]
        self.q_THD = torch.randn(starts[-1], H + 2 * K, D).to(case.dtype).to(DEVICE)[:, :H]
        self.options = dict(scale=0.1, window=case.window, softcap=case.softcap)
        rows = ints([2 * r + 1 for r in range(len(lens))])
        self.tables = AttentionTables(ints(starts), ints(lens), table.to(DEVICE), size, int(counts.max()), rows=rows)

    def expected(self) -> Tensor:
        return twin.paged_attention(self.q_THD.float(), self.plain.float(), self.tables, **self.options)

    def padded(self, num_rows: int) -> AttentionTables:
        """Tables with padding as in a recorded graph: rows without context, the first of them with three tokens."""
        tables, count = self.tables, len(self.q_THD)
        self.q_THD = torch.cat((self.q_THD, self.q_THD[:3]))
        return replace(
            tables,
            query_starts=torch.cat((tables.query_starts, ints([count + 3] * num_rows))),
            context_lens=torch.cat((tables.context_lens, ints([0] * num_rows))),
            rows=torch.cat((tables.rows, ints([-1] * num_rows))),
        )

    def check(self, found: Tensor) -> None:
        expected = self.expected()
        torch.testing.assert_close(found[: len(expected)].float(), expected, rtol=4e-3, atol=4e-3)


def ints(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


CASES = {
    "mixed rows": Case(),
    "decode": Case(((1, 0), (1, 15), (1, 16), (1, 200))),
    "one long prompt": Case(((90, 0),)),
    "window": Case(window=20),
    "window of one": Case(window=1),
    "soft cap": Case(softcap=2.0),
    "blocks of 48": Case(block_size=48),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_version_3_equals_the_twin(install, case: Case) -> None:
    install("flash_attn_interface", "flash_attn")
    world = World(case)
    world.check(backend.paged_attention(world.q_THD, world.cache, world.tables, **world.options))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_version_2_equals_the_twin_in_blocks_of_256(install, case: Case) -> None:
    install("flash_attn")
    world = World(replace(case, block_size=256))
    world.check(backend.paged_attention(world.q_THD, world.cache, world.tables, **world.options))


@pytest.mark.parametrize("name", ["flash_attn_interface", "flash_attn"])
def test_padding_rows_see_nothing_and_disturb_nobody(install, name: str) -> None:
    install(name)
    world = World(Case(block_size=256))
    expected, padded = world.expected(), world.padded(4)
    found = backend.paged_attention(world.q_THD, world.cache, padded, **world.options)
    torch.testing.assert_close(found[:-3].float(), expected, rtol=4e-3, atol=4e-3)
    assert found[-3:].eq(0).all()


def test_results_go_where_they_are_wanted_and_tables_need_no_rows(install) -> None:
    install("flash_attn_interface")
    world = World(Case())
    out = torch.full(world.q_THD.shape, math.nan, dtype=world.q_THD.dtype, device=DEVICE)
    tables = replace(world.tables, block_table=world.tables.block_table[1::2], rows=None)
    assert backend.paged_attention(world.q_THD, world.cache, tables, **world.options, out=out) is out
    world.check(out)


def supports(dtype: torch.dtype, head_size: int, block_size: int) -> bool:
    return backend.why_not(torch.device("cpu"), dtype, head_size, block_size, dtype) is None


def test_what_is_supported_depends_on_the_version(install) -> None:
    install("flash_attn_interface", "flash_attn")
    assert supports(torch.bfloat16, 128, 16) and supports(torch.float16, 80, 48)
    assert not supports(torch.float32, 128, 16) and not supports(torch.bfloat16, 100, 16)
    assert not supports(torch.bfloat16, 512, 16)
    install("flash_attn")
    assert supports(torch.bfloat16, 128, 256) and not supports(torch.bfloat16, 128, 16)


def test_without_the_library_one_sentence_says_what_to_install(install) -> None:
    install()
    with pytest.raises(ConfigError, match="pip install flash-attn"):
        supports(torch.bfloat16, 128, 16)


def test_sinks_are_refused(install) -> None:
    install("flash_attn_interface")
    world = World(Case())
    with pytest.raises(ConfigError, match="no attention sinks"):
        backend.paged_attention(world.q_THD, world.cache, world.tables, **world.options, sinks_H=torch.zeros(6))
