"""Attention of long prompts that begin in this step: over the step's own keys and values, with cuDNN through torch.

Called by `layers/attention` for rows that are left out of the paged kernel's work: nothing of them is in the cache yet, and at
thousands of tokens cuDNN's kernel is half as fast again as the paged one. Knows tensors only.

Shape letters: T tokens of the step, H query heads, K key/value heads, D head size.
"""

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

MIN_TOKENS = 2048
STEP = 512  # cuDNN prepares itself for every length it has not seen: only multiples of this


def supports(query: Tensor, head_size: int, value_size: int | None = None) -> bool:
    """`value_size`: where it is not the keys'."""
    sizes = (head_size <= 128 and head_size % 8 == 0) or (head_size, value_size) == (192, 128)
    return (
        query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and sizes
        and torch.backends.cudnn.is_available()
    )


def uncached_prefill_attention(
    q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, spans: tuple[tuple[int, int], ...], out_THD: Tensor, *, scale: float
) -> None:
    """Causal attention within each of `spans` (first token, number of tokens), into `out_THD`."""
    for first, count in spans:
        q, k, v = (x[first : first + count].transpose(0, 1)[None] for x in (q_THD, k_TKD, v_TKD))
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION if q.is_cuda else SDPBackend.MATH):
            out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        out_THD[first : first + count] = out[0].transpose(0, 1)
