"""FlashAttention, if installed and asked for with `--attention-backend flash_attn`: 16-bit floats, head sizes to 256.

Version 3 (`flash_attn_interface`, for Hopper) takes blocks of any size; where only version 2 (`flash_attn`) is
installed, blocks are multiples of 256 tokens. Written for flash-attn 2.8.3.post2 and the interface in its folder
`hopper`. All that is read is on the device, so steps can be recorded. Attention sinks are not supported.
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
from quire.ops.elementwise.triton_rope import rope_and_write


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


def why_not(
    device: torch.device, dtype: torch.dtype, head_size: int, block_size: int, cache_dtype: torch.dtype
) -> str | None:
    version, _ = _library()
    if dtype not in (torch.float16, torch.bfloat16):
        return "it computes in 16-bit floats"
    if cache_dtype != dtype:
        return "it reads no 8-bit cache with a scale per token and head: leave out --kv-cache-dtype"
    if head_size % 8 or head_size > 256:
        return f"it has no kernel for head size {head_size}"
    if version == 2 and block_size % 256:
        return f"version 2 has no kernel for blocks of {block_size}"
    return None


def paged_attention(
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
    """As the reference, without sinks; the output of padding is undefined."""
    if sinks_H is not None:
        raise ConfigError(
            "FlashAttention has no attention sinks, which this model uses: leave out --attention-backend flash_attn"
        )
    version, library = _library()
    # [blocks, block_size, K, D]; the library takes any strides.
    keys, values = cache_view(cache).transpose(2, 3).unbind(1)
    block_table = tables.block_table
    if tables.rows is not None:
        block_table = block_table.index_select(0, tables.rows.clamp(min=0))  # padding sees no key, whatever its row
    window_size = (window - 1, 0) if window else (-1, -1)  # keys before and after the query's own
    options = dict(softmax_scale=scale, causal=True, window_size=window_size, softcap=softcap)
    if version == 3:
        result = library.flash_attn_with_kvcache(
            q_THD,
            keys,
            values,
            cache_seqlens=tables.context_lens,
            page_table=block_table,
            cu_seqlens_q=tables.query_starts,
            max_seqlen_q=tables.max_query_len,
            **options,
        )
    else:
        # Only the differences of these count, which are the lengths: keys are found by the block table.
        key_ends = tables.context_lens.cumsum(0, dtype=torch.int32)
        key_starts = torch.nn.functional.pad(key_ends, (1, 0))
        max_keys = block_table.shape[1] * tables.block_size
        result = library.flash_attn_varlen_func(
            q_THD,
            keys,
            values,
            tables.query_starts,
            key_starts,
            tables.max_query_len,
            max_keys,
            block_table=block_table,
            **options,
        )
    return result if out is None else out.copy_(result)


class FlashAttention(AttentionBackend):
    rope_and_write = staticmethod(rope_and_write)
    paged_attention = staticmethod(paged_attention)


BACKEND = FlashAttention
