"""FlashAttention, where it is installed and `--attention-backend flash_attn` asks for it: 16-bit floats, head sizes to 256.

Version 3 (`flash_attn_interface`, for Hopper) takes blocks of any size; where only version 2 (`flash_attn`) is installed, blocks are
multiples of 256 tokens. Written for flash-attn 2.8.3.post2 and the interface in its folder `hopper`. All that is read lies on the device,
so steps can be recorded. There are no attention sinks.
"""

import functools
import importlib
from types import ModuleType

import torch
from torch import Tensor

from quire.errors import ConfigError
from quire.layers.attention.base import AttentionBackend
from quire.ops.attention.reference import AttentionTables
from quire.ops.attention.triton import cache_view
from quire.ops.elementwise.triton import rope_and_write


@functools.cache
def _library() -> tuple[int, ModuleType]:
    """(major version, module), the newest there is."""
    for version, name in ((3, "flash_attn_interface"), (2, "flash_attn")):
        try:
            return version, importlib.import_module(name)
        except ImportError:
            continue
    raise ConfigError(
        "--attention-backend flash_attn needs FlashAttention: pip install flash-attn, or leave the flag out"
    )


def why_not(device: torch.device, dtype: torch.dtype, head_size: int, block_size: int) -> str | None:
    version, _ = _library()
    if dtype not in (torch.float16, torch.bfloat16):
        return "it computes in 16-bit floats"
    if head_size % 8 or head_size > 256:
        return f"it has no kernel for head size {head_size}"
    return None if version == 3 or block_size % 256 == 0 else f"version 2 has no kernel for blocks of {block_size}"


def paged_attention(
    q_THD: Tensor,
    cache: Tensor,
    tables: AttentionTables,
    *,
    scale: float,
    window: int = 0,
    sinks_H: Tensor | None = None,
    softcap: float = 0.0,
    out: Tensor | None = None,
) -> Tensor:
    """As the twin, but for sinks; the output of padding may be anything."""
    if sinks_H is not None:
        raise ConfigError(
            "FlashAttention has no attention sinks, which this model uses: leave out --attention-backend flash_attn"
        )
    version, library = _library()
    keys, values = (
        cache_view(cache).transpose(2, 3).unbind(1)
    )  # [blocks, block_size, K, D]; the library takes any strides
    rows, block_table = tables.rows, tables.block_table
    block_table = (
        block_table if rows is None else block_table.index_select(0, rows.clamp(min=0))
    )  # padding sees no key in any row
    window_size = (window - 1, 0) if window else (-1, -1)  # before and behind the query itself
    options = dict(softmax_scale=scale, causal=True, window_size=window_size, softcap=softcap)
    if version == 3:
        found = library.flash_attn_with_kvcache(
            q_THD, keys, values, cache_seqlens=tables.context_lens, page_table=block_table,
            cu_seqlens_q=tables.query_starts, max_seqlen_q=tables.max_query_len, **options,
        )  # fmt: skip
    else:
        ends = tables.context_lens.cumsum(
            0, dtype=torch.int32
        )  # their differences are the lengths; blocks are found by the table
        most = block_table.shape[1] * tables.block_size
        found = library.flash_attn_varlen_func(
            q_THD, keys, values, tables.query_starts, torch.nn.functional.pad(ends, (1, 0)), tables.max_query_len, most,
            block_table=block_table, **options,
        )  # fmt: skip
    return found if out is None else out.copy_(found)


class FlashAttention(AttentionBackend):
    rope_and_write = staticmethod(rope_and_write)
    paged_attention = staticmethod(paged_attention)


BACKEND = FlashAttention
