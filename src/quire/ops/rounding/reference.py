"""Numbers rounded to 8 bits, with one scale for each vector of them, in plain torch.

The rule is the same wherever numbers are rounded while a model runs: the inputs of products (`ops/packed_linear`), keys
and values (`ops/attention`), latents (`ops/mla`). It reads the vector alone, so company never changes a code. Knows
tensors only.
"""

import torch
from torch import Tensor

FLOAT8 = torch.float8_e4m3fn
MAX_FLOAT8 = 448.0
TINY = 1e-30  # the least that a vector's largest number counts as, so that zeros have a scale
GROUP_INPUTS = 128  # of a product that share a scale, with the rounding "float8 group"
LARGEST_CODE = {FLOAT8: MAX_FLOAT8, torch.int8: 127.0}
# What a vector's largest number becomes. From 256 on the steps between float8 are twice as large, and few numbers of a
# vector are near its largest: so errors are smaller than with 448 (4% of their squares, in vectors of 64).
CODE_OF_LARGEST = {FLOAT8: 256.0, torch.int8: 127.0}


def round_vectors(x: Tensor, dtype: torch.dtype, fixed_scale: float | None = None) -> tuple[Tensor, Tensor]:
    """(codes, float32 scales without the last dimension), of the vectors along the last dimension.

    With `fixed_scale`, what is too large for it gets the largest code.
    """
    x = x.float()
    limit, code = LARGEST_CODE[dtype], CODE_OF_LARGEST[dtype]
    largest = x.abs().amax(-1).clamp(min=TINY)
    if fixed_scale is not None:
        largest = torch.full_like(largest, fixed_scale * code)
    inverse = torch.full_like(largest, code) / largest  # a number over a tensor would be rounded twice
    scaled = (x * inverse.unsqueeze(-1)).clamp(-limit, limit)
    codes = scaled.round().to(torch.int8) if dtype == torch.int8 else scaled.to(FLOAT8)
    return codes, largest / code
