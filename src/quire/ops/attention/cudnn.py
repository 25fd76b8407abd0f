"""Attention of long prompts that begin in this step, with cuDNN through torch: over the step's own keys and values.

Called by `layers/attention` for rows that have nothing in the cache yet; they are left out of the paged kernel's work.
At thousands of tokens cuDNN's kernel is one and a half times as fast as the paged one. Knows tensors only.

Shape letters: T tokens of the step, H query heads, K key/value heads, D head size.
"""

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

MIN_TOKENS = 2048
STEP = 512  # only multiples of this many tokens: cuDNN builds a plan for every length it has not seen before


def supports(query: Tensor, head_size: int, value_size: int | None = None) -> bool:
    """Whether cuDNN takes heads of this size; `value_size` where values are not as wide as keys."""
    if not query.is_cuda or query.dtype not in (torch.bfloat16, torch.float16):
        return False
    takes_sizes = (head_size <= 128 and head_size % 8 == 0) or (head_size, value_size) == (192, 128)
    return takes_sizes and torch.backends.cudnn.is_available()


def uncached_prefill_attention(
    q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, spans: tuple[tuple[int, int], ...], out_THD: Tensor, *, scale: float
) -> None:
    """Causal attention within each of `spans` (first token, number of tokens), into `out_THD`."""
    for first, count in spans:
        q, k, v = (x[first : first + count].transpose(0, 1)[None] for x in (q_THD, k_TKD, v_TKD))
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION if q.is_cuda else SDPBackend.MATH):
            out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        out_THD[first : first + count] = out[0].transpose(0, 1)
