"""The FlashInfer backend against the torch reference, with a stand-in that has the library's signatures and refuses
what it refuses."""

import math
import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from torch import Tensor

from quire.errors import ConfigError
from quire.layers.attention import flashinfer as backend
from quire.layers.attention.base import Limits
from tests.layers.test_flash_attn import CASES, DEVICE, Case, World, dense, ints


class BatchPrefillWithPagedKVCacheWrapper:
    """Copies what is planned, as the library does; `run` checks what the library's `run` checks."""

    made = 0

    def __init__(
        self,
        float_workspace_buffer,
        kv_layout="NHD",
        use_cuda_graph=False,
        qo_indptr_buf=None,
        paged_kv_indptr_buf=None,
        paged_kv_indices_buf=None,
        paged_kv_last_page_len_buf=None,
        custom_mask_buf=None,
        mask_indptr_buf=None,
        backend="auto",
        jit_args=None,
        jit_kwargs=None,
        variant_owns_mask=False,
    ) -> None:
        assert float_workspace_buffer.dtype == torch.uint8 and float_workspace_buffer.data_ptr() % 16 == 0
        assert kv_layout == "HND" and not use_cuda_graph and backend in ("auto", "fa2", "fa3")
        type(self).made += 1
        self.num_plans = 0

    def plan(
        self,
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim_qk,
        page_size,
        head_dim_vo=None,
        custom_mask=None,
        packed_custom_mask=None,
        causal=False,
        pos_encoding_mode="NONE",
        use_fp16_qk_reduction=False,
        sm_scale=None,
        window_left=-1,
        logits_soft_cap=None,
        rope_scale=None,
        rope_theta=None,
        q_data_type="float16",
        kv_data_type=None,
        o_data_type=None,
        non_blocking=True,
        prefix_len_ptr=None,
        token_pos_in_items_ptr=None,
        token_pos_in_items_len=0,
        max_item_len_ptr=None,
        seq_lens=None,
        seq_lens_q=None,
        block_tables=None,
        max_token_per_sequence=None,
        max_sequence_kv=None,
        fixed_split_size=None,
        disable_split_kv=False,
        uniform_q_len=None,
    ) -> None:
        indices = paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len
        assert all(x.dtype == torch.int32 and x.is_contiguous() for x in (qo_indptr, *indices))
        assert causal and paged_kv_indptr[0] == 0 and len(paged_kv_indices) == paged_kv_indptr[-1]
        assert (paged_kv_indptr.diff() >= 1).all() and (paged_kv_indices >= 0).all()
        assert ((paged_kv_last_page_len >= 1) & (paged_kv_last_page_len <= page_size)).all()
        self.starts, self.indptr, self.indices, self.last = (x.clone() for x in (qo_indptr, *indices))
        self.heads, self.size, self.dtype = (num_qo_heads, num_kv_heads, head_dim_qk), page_size, q_data_type
        self.softmax = sm_scale, (window_left, 0), logits_soft_cap or 0.0
        self.num_plans += 1

    def run(
        self,
        q,
        paged_kv_cache,
        *args,
        q_scale=None,
        k_scale=None,
        v_scale=None,
        out=None,
        lse=None,
        return_lse=False,
        lse_base="log2",
        lse_layout="NH",
        enable_pdl=None,
        window_left=None,
        sinks=None,
        kv_cache_sf=None,
        skip_softmax_threshold_scale_factor=None,
        use_fp16_softmax=None,
        uses_spcompress=None,
    ) -> Tensor:
        H, K, D = self.heads
        assert q.shape == (self.starts[-1], H, D) and q.stride(-1) == 1
        assert q.dtype == paged_kv_cache.dtype == self.dtype
        assert paged_kv_cache.shape[1:] == (2, K, self.size, D) and out.shape == q.shape and out.is_contiguous()
        starts, ends = self.starts.tolist(), self.indptr.tolist()
        for row, last in enumerate(self.last.tolist()):
            blocks = self.indices[ends[row] : ends[row + 1]].long().to(q.device)
            count, span = (len(blocks) - 1) * self.size + last, slice(starts[row], starts[row + 1])
            keys, values = paged_kv_cache[blocks].permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :count]
            out[span] = dense(q[span], keys, values, *self.softmax)
        return out


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch):
    module = ModuleType("flashinfer")
    module.BatchPrefillWithPagedKVCacheWrapper = BatchPrefillWithPagedKVCacheWrapper
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr(backend, "WORKSPACE_BYTES", 1024)
    monkeypatch.setattr(BatchPrefillWithPagedKVCacheWrapper, "made", 0)
    limits = Limits(num_rows=8, max_tokens=512, max_len=512, hidden_like=torch.empty(0, device=DEVICE))
    module.attention = backend.FlashInfer((), block_size=16, limits=limits)
    return module


def run(library: ModuleType, world: World, tables=None, **options) -> Tensor:
    return library.attention.paged_attention(
        world.q_THD, world.cache, tables or world.tables, **world.options | options
    )


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_any_mix_of_rows_equals_the_twin(library, case: Case) -> None:
    world = World(case)
    world.check(run(library, world))


def test_a_step_is_planned_once_for_all_layers_of_a_kind_and_anew_for_the_next(library) -> None:
    first, second = World(Case()), World(Case(((2, 50), (1, 9))))
    for world in (first, first, second, first):
        world.check(run(library, world))
    run(library, first, window=20)
    kind, planned = kind_of(first), library.attention.planned
    assert planned[kind].wrapper.num_plans == 3
    assert planned[kind._replace(window=20)].wrapper.num_plans == 1
    assert library.BatchPrefillWithPagedKVCacheWrapper.made == 2


def kind_of(world: World) -> backend.Kind:
    return backend.Kind(world.q_THD.device, world.q_THD.dtype, 6, 2, 64, world.cache.shape[2], 0.1, 0, 0.0)


def test_a_step_of_padding_alone_runs(library) -> None:
    """The engine's trial step is such a step: a row has more tokens than any table has blocks for."""
    world = World(Case(((200, 0),)))
    nobody = dict(query_starts=ints([0, 200, 200]), context_lens=ints([0, 0]), rows=ints([-1, -1]))
    tables = replace(world.tables, block_table=world.tables.block_table[:, :2].contiguous(), **nobody)
    assert run(library, world, tables).isfinite().all()


def test_padding_rows_disturb_nobody(library) -> None:
    world = World(Case())
    expected = world.expected()
    torch.testing.assert_close(run(library, world, world.padded(4))[:-3].float(), expected, rtol=4e-3, atol=4e-3)


def test_tokens_past_the_last_row_are_left_as_they_are(library) -> None:
    world = World(Case())
    count = len(world.q_THD)
    world.q_THD = torch.cat((world.q_THD, world.q_THD[:2]))
    out = torch.full(world.q_THD.shape, math.nan, dtype=world.q_THD.dtype, device=DEVICE)
    assert run(library, world, out=out) is out and out[count:].isnan().all()
    torch.testing.assert_close(out[:count].float(), world.expected()[:count], rtol=4e-3, atol=4e-3)


def supports(dtype: torch.dtype, head_size: int, block_size: int) -> bool:
    return backend.why_not(torch.device("cpu"), dtype, head_size, block_size, dtype) is None


def test_what_is_supported(library) -> None:
    assert supports(torch.bfloat16, 128, 16) and supports(torch.float16, 256, 48)
    assert not supports(torch.float32, 128, 16) and not supports(torch.bfloat16, 80, 16)


def test_without_the_library_one_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(ConfigError, match="pip install flashinfer-python"):
        supports(torch.bfloat16, 128, 16)


def test_sinks_are_refused(library) -> None:
    with pytest.raises(ConfigError, match="no attention sinks"):
        run(library, World(Case()), sinks_H=torch.zeros(6))
