"""Grammar masks on a GPU: one launch forbids what the packed masks of some rows do not allow.

Called by the runner between computing logits and choosing tokens.

Letters: S rows that choose a token, V vocabulary, M masked rows, W words.
"""

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit
def _mask_kernel(logits, places, words, V, W, stride, BLOCK: tl.constexpr):
    row = tl.load(places + tl.program_id(0)).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (token < V) & (row >= 0)
    word = tl.load(words + tl.program_id(0).to(tl.int64) * W + token // 32, mask=inside, other=-1)
    is_forbidden = ((word >> (token % 32)) & 1) == 0
    tl.store(logits + row * stride + token, float("-inf"), mask=is_forbidden & inside)


def mask_logits(logits_SV: Tensor, places_M: Tensor, words_MW: Tensor) -> None:
    """As in `ops/mask/reference.py`."""
    V = logits_SV.shape[1]
    _mask_kernel[(len(places_M), triton.cdiv(V, BLOCK))](
        logits_SV, places_M, words_MW, V, words_MW.shape[1], logits_SV.stride(0), BLOCK=BLOCK
    )
