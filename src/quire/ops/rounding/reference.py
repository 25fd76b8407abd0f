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


def round_vectors(x: Tensor, dtype: torch.dtype, fixed_scale: float | None = None) -> tuple[Tensor, Tensor]:
    """(codes, float32 scales without the last dimension), of the vectors along the last dimension.

    The largest number of a vector gets the largest code. With `fixed_scale`, what is too large for it gets that code.
    """
    x = x.float()
    largest_code = LARGEST_CODE[dtype]
    largest = x.abs().amax(-1).clamp(min=TINY)
    if fixed_scale is not None:
        largest = torch.full_like(largest, fixed_scale * largest_code)
    inverse = torch.full_like(largest, largest_code) / largest  # a number over a tensor would be rounded twice
    scaled = (x * inverse.unsqueeze(-1)).clamp(-largest_code, largest_code)
    codes = scaled.round().to(torch.int8) if dtype == torch.int8 else scaled.to(FLOAT8)
    return codes, largest / largest_code
