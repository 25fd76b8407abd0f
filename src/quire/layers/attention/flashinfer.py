"""FlashInfer, if installed and asked for with `--attention-backend flashinfer`: 16-bit floats, head sizes 64, 128, 256.

Written for flashinfer-python 0.7.2.post1. It plans each step on the host, so steps are not recorded, and planning waits
for the step before. Attention sinks are not supported.

Shape letters: T query tokens of the step, R rows, H query heads, K key/value heads, D head size, N blocks of all rows.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quire.errors import ConfigError
from quire.layers.attention import CacheLayer
from quire.layers.attention.base import AttentionBackend, Limits
from quire.ops.attention.reference import AttentionTables
from quire.ops.attention.triton import cache_view
from quire.ops.elementwise.triton_rope import rope_and_write

# As FlashInfer's documentation advises. It holds partial results of one launch, so all layers of a kind share it.
WORKSPACE_BYTES = 128 << 20
IMPLEMENTATION = "auto"  # FlashInfer chooses the kernel for the card


class Kind(NamedTuple):
    """What layers have in common that share a plan."""

    device: torch.device
    dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    head_size: int
    block_size: int
    scale: float
    window: int
    softcap: float


class Planned:
    """The library's plan of a step, made when the first layer of a kind is computed."""

    def __init__(self, kind: Kind, workspace: Tensor) -> None:
        self.kind = kind
        self.wrapper = _library().BatchPrefillWithPagedKVCacheWrapper(workspace, "HND", backend=IMPLEMENTATION)
        self.tables: AttentionTables | None = None
        self.num_tokens = 0

    def plan(self, tables: AttentionTables) -> None:
        """Copying to the host waits for the device. This is needed: until then the wrapper's memory may hold the last
        plan, not yet copied to the device."""
        kind, table = self.kind, tables.block_table
        query_starts = tables.query_starts.cpu()
        context_lens = tables.context_lens.cpu()
        rows_R = torch.arange(len(context_lens)) if tables.rows is None else tables.rows.cpu().clamp(min=0)
        # A padding row has no context, but the library needs at least one token: it gets blocks for its own tokens.
        lens_R = torch.maximum(context_lens, query_starts.diff().clamp(min=1))
        counts_R = (lens_R + kind.block_size - 1) // kind.block_size
        ends_R = counts_R.cumsum(0, dtype=torch.int32)
        column_N = torch.arange(int(ends_R[-1])) - (ends_R - counts_R).repeat_interleave(counts_R)
        place_N = rows_R.repeat_interleave(counts_R) * table.stride(0) + column_N.clamp(max=table.shape[1] - 1)
        block_N = table.as_strided((table.shape[0] * table.stride(0),), (1,))[place_N.to(table.device)]
        self.wrapper.plan(
            query_starts,
            torch.nn.functional.pad(ends_R, (1, 0)),
            block_N.clamp(min=0),  # stale entries are negative
            lens_R - (counts_R - 1) * kind.block_size,
            kind.num_heads,
            kind.num_kv_heads,
            kind.head_size,
            kind.block_size,
            causal=True,
            sm_scale=kind.scale,
            window_left=kind.window - 1,
            logits_soft_cap=kind.softcap,
            q_data_type=kind.dtype,
            kv_data_type=kind.dtype,
        )
        self.tables = tables
        self.num_tokens = int(query_starts[-1])


def why_not(
    device: torch.device, dtype: torch.dtype, head_size: int, block_size: int, cache_dtype: torch.dtype
) -> str | None:
    _library()
    if dtype not in (torch.float16, torch.bfloat16):
        return "it computes in 16-bit floats"
    if cache_dtype != dtype:
        return "it reads no 8-bit cache with a scale per token and head: leave out --kv-cache-dtype"
    return None if head_size in (64, 128, 256) else f"it has no kernel for head size {head_size}"


class FlashInfer(AttentionBackend):
    is_recordable = False
    twin: "FlashInfer | None"
    rope_and_write = staticmethod(rope_and_write)

    def __init__(
        self, layers: Sequence[CacheLayer], block_size: int, limits: Limits, twin: "FlashInfer | None" = None
    ) -> None:
        super().__init__(layers, block_size, limits, twin)
        self.planned: dict[Kind, Planned] = {}
        self.workspace: Tensor | None = None  # made when the first layer is computed

    def paged_attention(
        self,
        q_THD: Tensor,
        cache: Tensor,
        tables: AttentionTables,
        *,
        scale: float,
        window: int = 0,
        sinks_H: Tensor | None = None,
        softcap: float = 0.0,
        scales: None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """As the reference, without sinks; `out` is contiguous. `tables` that are the same object are planned once."""
        if sinks_H is not None:
            raise ConfigError(
                "this FlashInfer backend has no attention sinks, which the model uses: "
                "leave out --attention-backend flashinfer"
            )
        (_, H, D), (_, _, block_size, K, _) = q_THD.shape, cache.shape
        planned = self._planned(Kind(q_THD.device, q_THD.dtype, H, K, D, block_size, scale, window, softcap))
        if planned.tables is not tables:
            planned.plan(tables)
        out = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device) if out is None else out
        count = planned.num_tokens
        # Without dependent launch: our kernels rely on every kernel before them to have waited for its predecessors.
        planned.wrapper.run(q_THD[:count], cache_view(cache), out=out[:count], enable_pdl=False)
        return out

    def _planned(self, kind: Kind) -> Planned:
        if kind not in self.planned:
            owner = self.twin or self
            if owner.workspace is None:
                owner.workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=kind.device)
            self.planned[kind] = Planned(kind, owner.workspace)
        return self.planned[kind]


def _library() -> Any:
    try:
        import flashinfer
    except ImportError:
        raise ConfigError(
            "--attention-backend flashinfer needs FlashInfer: pip install flashinfer-python, or leave the flag out"
        ) from None
    return flashinfer


BACKEND = FlashInfer
