"""What the sampler's kernels share: reading a row of logits, ordering floats, the noise that makes a choice random.

Triton functions that the kernels of `triton.py` and `triton_restricted.py` call. Noise is as `gumbel.py` defines it.
"""

import math

import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice

from quire.ops.launch import INTERPRETED
from quire.ops.sampling.gumbel import V_SCALE
from quire.ops.sampling.penalties import repaired
from quire.params import MIN_TEMPERATURE

NO_ID = tl.constexpr(2**31 - 1)  # larger than any token's id
LEAST_TEMPERATURE = tl.constexpr(MIN_TEMPERATURE)  # below it, a row is greedy

_INTERPRETED = tl.constexpr(INTERPRETED)
_V_SCALE = tl.constexpr(V_SCALE)
_LN_2 = tl.constexpr(math.log(2.0))


@triton.jit
def is_restricted(columns, float_at, int_at, vocab_size):
    top_k = tl.load(columns.top_k + int_at)
    limited = (tl.load(columns.top_p + float_at) < 1.0) | (tl.load(columns.min_p + float_at) > 0.0)
    limited = limited | ((top_k > 0) & (top_k < vocab_size))
    return limited & (tl.load(columns.temperature + float_at) >= LEAST_TEMPERATURE)


@triton.jit
def load_logits(logits, edited, use_edited, at, mask, PENALIZED: tl.constexpr):
    """A tile of the row as float32, -inf where masked; NaN and inf are still in it."""
    if PENALIZED:
        if use_edited:
            x = tl.load(edited + at, mask=mask, other=float("-inf"))
        else:
            x = tl.load(logits + at, mask=mask, other=float("-inf")).to(tl.float32)
    else:
        x = tl.load(logits + at, mask=mask, other=float("-inf")).to(tl.float32)
    return x


@triton.jit
def exact_log(x):
    """Exact to about the last bit, unlike tl.log on a GPU."""
    return tl.log(x) if _INTERPRETED else libdevice.log(x)


@triton.jit
def sortable(x):
    """int64 in the order of the floats; -0 becomes 0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def unsortable(key):
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def append_token(out, tokens, tokens_stride, max_len, s, row, position, token_id):
    tl.store(out + s, token_id)
    tl.store(tokens + row.to(tl.int64) * tokens_stride + position, token_id, mask=position < max_len)


@triton.jit
def argmax(logits, edited, use_edited, begin, end, BLOCK: tl.constexpr, PENALIZED: tl.constexpr):
    """Maximum of the row's tokens from `begin` to `end`, and the lowest id that has it."""
    at = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_id = begin + at
    for start in range(begin, end, BLOCK):
        ids = start + at
        x = repaired(load_logits(logits, edited, use_edited, ids, ids < end, PENALIZED))
        better = x > best
        best = tl.where(better, x, best)
        best_id = tl.where(better, ids, best_id)
    top = tl.max(best)
    return top, tl.min(tl.where(best == top, best_id, NO_ID))


@triton.jit
def _mix64(z):
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def row_key(columns, int_at, position):
    """The two halves of the row's key, uint32; the high one is odd."""
    counter = (tl.load(columns.choice_idx + int_at) << 32) | position.to(tl.int64)
    key = _mix64(tl.load(columns.seed + int_at).to(tl.uint64) + 0x9E3779B97F4A7C15)
    key = _mix64(key ^ counter.to(tl.uint64))
    return key.to(tl.uint32), (key >> 32).to(tl.uint32) | 1


@triton.jit
def uniform(ids, low, high):
    """v * 2**31 - 0.5 for each token."""
    t = ids.to(tl.uint32)
    t = (t ^ (t >> 16)) * 0x7FEB352D
    t = (t ^ (t >> 15)) * 0x846CA68B
    h = ((t ^ (t >> 16) ^ low) * high).to(tl.int32, bitcast=True)
    return tl.abs(((h ^ (h >> 15)) * -2073254261).to(tl.float32))  # 0x846CA68B as a signed number


@triton.jit
def noise_of(u):
    v = (u + 0.5) * _V_SCALE
    if _INTERPRETED:
        noise = -tl.log(-tl.log(1.0 - v.to(tl.float64))).to(tl.float32)
    else:
        noise = -libdevice.log(-libdevice.log1p(-v))
    return noise


@triton.jit
def largest_bound(x, per_temperature, u):
    """An upper bound of the tile's scores: E >= v, and a float's bits as a fixed-point number give at most its log2.

    The slack added at the end is for float32's rounding, that of `x * per_temperature` included.
    """
    bits = u.to(tl.int32, bitcast=True).to(tl.float32)
    bound = tl.max(x * per_temperature - bits * (_LN_2 * 2.0**-23)) + _LN_2 * (127 + 31)
    return bound + 1e-3 + 1e-6 * tl.minimum(tl.abs(bound), 1e30)
