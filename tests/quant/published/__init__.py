"""Quantized checkpoints made and read by the libraries that define their formats: the truth for our own readers.

A case needs its library: transformers (fp8), compressed-tensors (ct), bitsandbytes (bnb), nvidia-modelopt (modelopt).
Layers of the first round their inputs as those of the second do.
`python -m tests.quant.published` prints all of them.
"""

from collections.abc import Callable

from tests.quant.published import bnb, compressed, finegrained_fp8, modelopt
from tests.quant.published.common import PARTIAL, SIZES, Published, write

CASES: dict[str, Callable[[], Published]] = {
    **finegrained_fp8.CASES,
    **compressed.CASES,
    **bnb.CASES,
    **modelopt.CASES,
}

__all__ = ["CASES", "PARTIAL", "SIZES", "Published", "write"]
