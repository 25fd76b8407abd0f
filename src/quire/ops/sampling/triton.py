"""One token per sample on a GPU, in Triton, written where the next step reads it; twin: `ops/sampling/reference.py`.

Called by the sampler, also inside a CUDA graph. Knows logits, columns of parameters and token histories; nothing of
requests. A sample's token depends on its row and position alone: not on other samples, nor on how the work is divided.

    penalized rows    logits ──► float32 copy ──┐
    other rows        logits ──────────────────┴► greedy, random: `_choose_kernel`, one launch, logits read once
                                                └► restricted: `_survey_kernel`, `_choose_restricted_kernel`

Nothing is sorted. Noise is computed only where a token can win: an upper bound costs a tenth of the noise's two
logarithms.

A restricted row is divided into slots of 64 tokens. From the slots' maxima and masses follows a floor that all kept
tokens reach; only slots that reach it are opened, that is, read again. Then tokens are drawn one after another, each
from those more likely than the last one, until one lies inside top_p. That is the token that wins among the kept ones.
It takes 1 + ln(1 / top_p) draws on average, and no search for top_p's limit.

Letters: S samples of the step, V vocabulary.
"""

import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import libdevice

from quire.ops.launch import INTERPRETED, options, pdl, wait_turn
from quire.ops.sampling.gumbel import V_SCALE
from quire.ops.sampling.penalties import is_penalized, penalize, repaired
from quire.ops.sampling.reference import SamplerColumns
from quire.params import MIN_TEMPERATURE

__all__ = ["SamplerColumns", "Scratch", "sample"]

SLOT = 64  # tokens; in bfloat16 they are one cache line
CHUNK_SLOTS = 64  # slots surveyed by one program
NUM_PROGRAMS = 1024  # of `_choose_kernel`, for all rows of a step
MAX_SPLITS = 256  # the most programs that share a row

_INTERPRETED = tl.constexpr(INTERPRETED)
_MIN_TEMPERATURE = tl.constexpr(MIN_TEMPERATURE)
_V_SCALE = tl.constexpr(V_SCALE)
_SLOT = tl.constexpr(SLOT)
_NO_ID = tl.constexpr(2**31 - 1)
_LOWEST = tl.constexpr(-torch.finfo(torch.float32).max)
_LN_2 = tl.constexpr(math.log(2.0))


def choose_config(num_rows: int, vocab_size: int) -> tuple[int, int, int]:
    """(tokens of a tile, tiles of a program, warps)."""
    block = 1024
    tiles = triton.cdiv(vocab_size, block)
    splits = min(max(NUM_PROGRAMS // num_rows, 1), MAX_SPLITS, tiles)
    return block, triton.cdiv(tiles, splits), 4


# The order in which masses are added depends on these, so they are the same for any number of rows.
SURVEY_WARPS = 8
RESTRICTED_TILE, RESTRICTED_WARPS = 32, 8  # slots


class Scratch:
    """Memory of the kernels of one engine whose steps have up to `num_rows` rows.

    What rare stages need is allocated when first used. Restricted rows take V / 5 bytes each (8 MB for 256 rows of
    151,936), penalized ones 4 V (156 MB).
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device | str) -> None:
        self.shape, self._device = (num_rows, vocab_size), device
        self.num_slots = triton.cdiv(vocab_size, SLOT * CHUNK_SLOTS) * CHUNK_SLOTS
        self.best = torch.empty(max(num_rows, NUM_PROGRAMS), dtype=torch.int64, device=device)
        self.arrived = torch.zeros(num_rows, dtype=torch.int32, device=device)  # 0 whenever no kernel runs

    @functools.cached_property
    def slots(self) -> Tensor:
        """Maximum and mass of each slot, [2, S, slots]."""
        return self._empty(2, self.shape[0], self.num_slots, dtype=torch.float32)

    @functools.cached_property
    def opened(self) -> Tensor:
        """The indices of the slots that are opened, [S, slots]."""
        return self._empty(self.shape[0], self.num_slots, dtype=torch.int32)

    @functools.cached_property
    def edited(self) -> Tensor:
        """The penalized rows' logits, [S, V]; before that, as int32, how often the history has each token."""
        return self._empty(*self.shape, dtype=torch.float32)

    def _empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("the sampler's scratch was not reserved before this graph's capture")
        return torch.empty(shape, dtype=dtype, device=self._device)


def sample(
    logits_SV: Tensor,
    rows_S: Tensor,
    positions_S: Tensor,
    columns: SamplerColumns,
    tokens: Tensor,
    out_S: Tensor,
    *,
    random: bool,
    restricted: bool,
    penalized: bool,
    scratch: Scratch,
) -> None:
    """As in `ops/sampling/reference.py`; `rows_S`, `positions_S`, `out_S` and `tokens` [num_rows, max_len] are int32.

    Logits are of any float type, contiguous in a row, and are left as they are. Histories are read by launches before
    the one that writes the first token.
    """
    num_rows, vocab_size = logits_SV.shape
    if num_rows > scratch.shape[0] or vocab_size != scratch.shape[1]:
        raise ValueError(f"logits are {num_rows} x {vocab_size}, the sampler's scratch was made for {scratch.shape}")
    if num_rows == 0:
        return
    restricted = restricted and random
    dependent = pdl(logits_SV)
    edited = scratch.edited if penalized else logits_SV
    if penalized:
        penalize(logits_SV, rows_S, positions_S, columns, tokens, edited)
    ends = out_S, tokens, tokens.stride(0), tokens.shape[1]
    source = logits_SV, edited, logits_SV.stride(0), vocab_size
    strides = columns.temperature.stride(0), columns.seed.stride(0)
    given = *ends, *source, rows_S, positions_S, columns, *strides
    flags = {"PENALIZED": penalized, "PDL": dependent, **options(dependent)}

    block, tiles, num_warps = choose_config(num_rows, vocab_size)
    grid = num_rows, triton.cdiv(vocab_size, block * tiles)
    _choose_kernel[grid](
        *given,
        scratch.best,
        scratch.arrived,
        tiles * block,
        RANDOM=random,
        RESTRICTED=restricted,
        BLOCK=block,
        SPLITS=MAX_SPLITS,
        num_warps=num_warps,
        **flags,
    )
    if not restricted:
        return
    num_slots = scratch.num_slots
    grid = num_rows, num_slots // CHUNK_SLOTS
    _survey_kernel[grid](
        *source,
        rows_S,
        columns,
        *strides,
        scratch.slots[0],
        scratch.slots[1],
        num_slots,
        CHUNK=CHUNK_SLOTS,
        num_warps=SURVEY_WARPS,
        **flags,
    )
    _choose_restricted_kernel[(num_rows,)](
        *given,
        scratch.slots[0],
        scratch.slots[1],
        scratch.opened,
        num_slots,
        SLOTS=triton.next_power_of_2(num_slots),
        TILE=RESTRICTED_TILE,
        num_warps=RESTRICTED_WARPS,
        **flags,
    )


# ---- rows and numbers ----


@triton.jit
def _is_restricted(columns, float_at, int_at, vocab_size):
    top_k = tl.load(columns.top_k + int_at)
    limited = (tl.load(columns.top_p + float_at) < 1.0) | (tl.load(columns.min_p + float_at) > 0.0)
    limited = limited | ((top_k > 0) & (top_k < vocab_size))
    return limited & (tl.load(columns.temperature + float_at) >= _MIN_TEMPERATURE)


@triton.jit
def _load(logits, edited, use_edited, at, mask, PENALIZED: tl.constexpr):
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
def _log(x):
    """Exact to about the last bit, unlike tl.log on a GPU."""
    return tl.log(x) if _INTERPRETED else libdevice.log(x)


@triton.jit
def _sortable(x):
    """int64 in the order of the floats; -0 becomes 0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _unsortable(key):
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _append(out, tokens, tokens_stride, max_len, s, row, position, token_id):
    tl.store(out + s, token_id)
    tl.store(tokens + row.to(tl.int64) * tokens_stride + position, token_id, mask=position < max_len)


@triton.jit
def _argmax(logits, edited, use_edited, begin, end, BLOCK: tl.constexpr, PENALIZED: tl.constexpr):
    """Maximum of the row's tokens from `begin` to `end`, and the lowest id that has it."""
    at = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_id = begin + at
    for start in range(begin, end, BLOCK):
        ids = start + at
        x = repaired(_load(logits, edited, use_edited, ids, ids < end, PENALIZED))
        better = x > best
        best = tl.where(better, x, best)
        best_id = tl.where(better, ids, best_id)
    top = tl.max(best)
    return top, tl.min(tl.where(best == top, best_id, _NO_ID))


# ---- noise, as ops/sampling/gumbel.py defines it ----


@triton.jit
def _mix64(z):
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def _row_key(columns, int_at, position):
    """The two halves of the row's key, uint32; the high one is odd."""
    counter = (tl.load(columns.choice_idx + int_at) << 32) | position.to(tl.int64)
    key = _mix64(tl.load(columns.seed + int_at).to(tl.uint64) + 0x9E3779B97F4A7C15)
    key = _mix64(key ^ counter.to(tl.uint64))
    return key.to(tl.uint32), (key >> 32).to(tl.uint32) | 1


@triton.jit
def _uniform(ids, low, high):
    """v * 2**31 - 0.5 for each token."""
    t = ids.to(tl.uint32)
    t = (t ^ (t >> 16)) * 0x7FEB352D
    t = (t ^ (t >> 15)) * 0x846CA68B
    h = ((t ^ (t >> 16) ^ low) * high).to(tl.int32, bitcast=True)
    return tl.abs(((h ^ (h >> 15)) * -2073254261).to(tl.float32))  # 0x846CA68B as a signed number


@triton.jit
def _noise(u):
    v = (u + 0.5) * _V_SCALE
    if _INTERPRETED:
        noise = -tl.log(-tl.log(1.0 - v.to(tl.float64))).to(tl.float32)
    else:
        noise = -libdevice.log(-libdevice.log1p(-v))
    return noise


@triton.jit
def _largest_bound(x, per_temperature, u):
    """An upper bound of the tile's scores: E >= v, and a float's bits as a fixed-point number give at most its log2.

    The slack added at the end is for float32's rounding, that of `x * per_temperature` included.
    """
    bits = u.to(tl.int32, bitcast=True).to(tl.float32)
    bound = tl.max(x * per_temperature - bits * (_LN_2 * 2.0**-23)) + _LN_2 * (127 + 31)
    return bound + 1e-3 + 1e-6 * tl.minimum(tl.abs(bound), 1e30)


# ---- greedy rows, and random ones that nothing restricts ----


@triton.jit
def _choose_kernel(
    out,
    tokens,
    tokens_stride,
    max_len,
    logits,
    edited,
    logits_stride,
    vocab_size,
    rows,
    positions,
    columns,
    float_stride,
    int_stride,
    partial,
    arrived,
    length,
    RANDOM: tl.constexpr,
    RESTRICTED: tl.constexpr,
    PENALIZED: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program has `length` tokens of a row.

    The last of the row's programs to finish compares what all of them found.
    """
    s, split, num_splits = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    wait_turn(PDL)
    row = tl.load(rows + s)
    if row < 0:
        if split == 0:
            tl.store(out + s, -1)
        return
    float_at, int_at = row.to(tl.int64) * float_stride, row.to(tl.int64) * int_stride
    if RESTRICTED:
        if _is_restricted(columns, float_at, int_at, vocab_size):
            return
    logits += s.to(tl.int64) * logits_stride
    edited += s.to(tl.int64) * vocab_size
    use_edited = is_penalized(columns, float_at) if PENALIZED else False
    position = tl.load(positions + s)
    begin = split * length
    end = tl.minimum(begin + length, vocab_size)
    if RANDOM:
        temperature = tl.load(columns.temperature + float_at)
        if temperature >= _MIN_TEMPERATURE:
            low, high = _row_key(columns, int_at, position)
            best, best_id = _draw(logits, edited, use_edited, begin, end, temperature, low, high, BLOCK, PENALIZED)
        else:
            best, best_id = _argmax(logits, edited, use_edited, begin, end, BLOCK, PENALIZED)
    else:
        best, best_id = _argmax(logits, edited, use_edited, begin, end, BLOCK, PENALIZED)

    # One integer that orders by score, then by lower id.
    partial += s * num_splits
    tl.store(partial + split, (_sortable(best) << 32) | (best_id ^ _NO_ID))
    if tl.atomic_add(arrived + s, 1, sem="acq_rel") == num_splits - 1:
        tl.store(arrived + s, 0)
        at = tl.arange(0, SPLITS)
        found = tl.load(partial + at, mask=at < num_splits, other=-(2**63), cache_modifier=".cg")
        key = tl.max(found)
        token_id = ((key & _NO_ID) ^ _NO_ID).to(tl.int32)
        if PENALIZED:
            if _unsortable(key >> 32) == float("-inf"):
                _, token_id = _argmax(logits, logits, False, 0, vocab_size, BLOCK, False)
        _append(out, tokens, tokens_stride, max_len, s, row, position, token_id)


@triton.jit
def _draw(logits, edited, use_edited, begin, end, temperature, low, high, BLOCK: tl.constexpr, PENALIZED: tl.constexpr):
    """The largest score of the row's tokens from `begin` to `end`, and the lowest id that has it."""
    at = tl.arange(0, BLOCK)
    best, best_id = tl.full((), float("-inf"), tl.float32), begin
    next_x = _load(logits, edited, use_edited, begin + at, begin + at < end, PENALIZED)
    for start in range(begin, end, BLOCK):
        ids = start + at
        x = next_x
        next_x = _load(logits, edited, use_edited, ids + BLOCK, ids + BLOCK < end, PENALIZED)
        u = _uniform(ids, low, high)
        if _largest_bound(x, 1.0 / temperature, u) >= best:
            score = tl.div_rn(repaired(x), temperature) + _noise(u)
            top = tl.max(score)
            if top > best:
                best, best_id = top, tl.min(tl.where(score == top, ids, _NO_ID))
    return best, best_id


# ---- random rows with min_p, top_k or top_p ----


@triton.jit
def _survey_kernel(
    logits,
    edited,
    logits_stride,
    vocab_size,
    rows,
    columns,
    float_stride,
    int_stride,
    slot_max,
    slot_mass,
    num_slots,
    CHUNK: tl.constexpr,
    PENALIZED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Of the scaled logits in each slot, the maximum, and the mass relative to it."""
    s = tl.program_id(0)
    wait_turn(PDL)
    row = tl.load(rows + s)
    if row < 0:
        return
    float_at, int_at = row.to(tl.int64) * float_stride, row.to(tl.int64) * int_stride
    if not _is_restricted(columns, float_at, int_at, vocab_size):
        return
    use_edited = is_penalized(columns, float_at) if PENALIZED else False
    temperature = tl.load(columns.temperature + float_at)
    logits += s.to(tl.int64) * logits_stride
    edited += s.to(tl.int64) * vocab_size
    slots = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    ids = slots[:, None] * _SLOT + tl.arange(0, _SLOT)[None, :]
    x = _load(logits, edited, use_edited, ids, ids < vocab_size, PENALIZED)
    y = tl.div_rn(repaired(x), temperature)
    top = tl.max(y, axis=1)
    mass = tl.sum(tl.exp(y - tl.maximum(top, _LOWEST)[:, None]), axis=1)
    at = s.to(tl.int64) * num_slots + slots
    tl.store(slot_max + at, top)
    tl.store(slot_mass + at, mass)


@triton.jit
def _choose_restricted_kernel(
    out,
    tokens,
    tokens_stride,
    max_len,
    logits,
    edited,
    logits_stride,
    vocab_size,
    rows,
    positions,
    columns,
    float_stride,
    int_stride,
    slot_max,
    slot_mass,
    opened,
    num_slots,
    PENALIZED: tl.constexpr,
    SLOTS: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    s = tl.program_id(0)
    wait_turn(PDL)
    row = tl.load(rows + s)
    if row < 0:
        return
    float_at, int_at = row.to(tl.int64) * float_stride, row.to(tl.int64) * int_stride
    if not _is_restricted(columns, float_at, int_at, vocab_size):
        return
    use_edited = is_penalized(columns, float_at) if PENALIZED else False
    temperature, position = tl.load(columns.temperature + float_at), tl.load(positions + s)
    top_p, min_p = tl.load(columns.top_p + float_at), tl.load(columns.min_p + float_at)
    top_k = tl.load(columns.top_k + int_at)
    top_k = tl.where((top_k > 0) & (top_k < vocab_size), top_k, vocab_size).to(tl.int32)
    logits += s.to(tl.int64) * logits_stride
    edited += s.to(tl.int64) * vocab_size
    opened += s.to(tl.int64) * num_slots

    slots = tl.arange(0, SLOTS)
    at = s.to(tl.int64) * num_slots + slots
    max_of = tl.load(slot_max + at, mask=slots < num_slots, other=float("-inf"))
    largest = tl.max(max_of)
    if largest == float("-inf"):
        token_id = 0
        if PENALIZED:
            _, token_id = _argmax(logits, logits, False, 0, vocab_size, TILE * _SLOT, False)
        _append(out, tokens, tokens_stride, max_len, s, row, position, token_id)
        return
    mass_of = tl.load(slot_mass + at, mask=slots < num_slots, other=0.0) * tl.exp(max_of - largest)
    whole = tl.sum(mass_of)

    # A floor that every kept token reaches, as high as can be told from the slots.
    min_p_floor = tl.where(min_p > 0.0, largest + _log(tl.maximum(min_p, 1e-37)), _LOWEST)
    floor = tl.maximum(min_p_floor, _LOWEST)
    only_top_p = (min_p <= 0.0) & (top_k == vocab_size)
    if top_k < vocab_size:
        floor = _rough_kth_floor(max_of, largest, floor, top_k)
    if only_top_p:
        floor = tl.maximum(floor, _top_p_floor(max_of, mass_of, largest, whole, top_p, vocab_size))
    open_slots = max_of >= floor
    tl.store(opened + tl.cumsum(open_slots.to(tl.int32)) - 1, slots, mask=open_slots)
    num_open = tl.sum(open_slots.to(tl.int32))
    tl.debug_barrier()  # the list is read by other threads than those that wrote it

    if top_k < vocab_size:
        floor = _kth_floor(
            logits,
            edited,
            use_edited,
            temperature,
            opened,
            num_open,
            vocab_size,
            largest,
            floor,
            top_k,
            TILE,
            PENALIZED,
        )
    low, high = _row_key(columns, int_at, position)
    given = logits, edited, use_edited, temperature, low, high, opened, num_open, vocab_size
    mass, token_id, token_y = _draw_before(_NO_ID, float("-inf"), floor, largest, *given, TILE, PENALIZED)
    # Without top_p, the first token drawn is kept. (Only these three values are carried through the loop: with the next
    # token carried as well, Triton 3.6 returned the wrong one of the two.)
    limit = top_p * tl.where(only_top_p, whole, mass)
    is_outside = top_p < 1.0
    while is_outside:
        mass_before, next_id, next_y = _draw_before(token_id, token_y, floor, largest, *given, TILE, PENALIZED)
        is_outside = mass_before >= limit
        token_id = tl.where(is_outside, next_id, token_id)
        token_y = tl.where(is_outside, next_y, token_y)
    _append(out, tokens, tokens_stride, max_len, s, row, position, token_id)


@triton.jit
def _rough_kth_floor(max_of, largest, floor, k):
    """A value that the maxima of at least k slots reach, and not many more: so at least k tokens reach it.

    `floor`, if fewer than k slots reach that.
    """
    low, high = _sortable(floor), _sortable(largest) + 1
    count = tl.sum((max_of >= floor).to(tl.int32))
    while (high - low > 1) & (count > k + k // 8):
        middle = (low + high) >> 1
        reaching = tl.sum((max_of >= _unsortable(middle)).to(tl.int32))
        if reaching >= k:
            low, count = middle, reaching
        else:
            high = middle
    return _unsortable(low)


@triton.jit
def _top_p_floor(max_of, mass_of, largest, whole, top_p, vocab_size):
    """A value below which lies less than 1 - top_p of the mass.

    That is all mass of closed slots, and in open ones at most that of 64 tokens just below the value.
    """
    spare = 0.99 * (1.0 - top_p) * whole  # a little less than allowed, because of rounding
    low = largest + tl.log(tl.maximum(spare / vocab_size, 1e-37))
    high = largest
    for _ in range(6):
        middle = 0.5 * (low + high)
        is_open = max_of >= middle
        below = tl.sum(tl.where(is_open, tl.exp(middle - largest) * _SLOT, mass_of))
        if below <= spare:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _load_open(
    first,
    logits,
    edited,
    use_edited,
    temperature,
    opened,
    num_open,
    vocab_size,
    TILE: tl.constexpr,
    PENALIZED: tl.constexpr,
):
    """(ids, scaled logits) of a tile of open slots; the logits are -inf where there is no token."""
    places = first + tl.arange(0, TILE)
    slots = tl.load(opened + places, mask=places < num_open, other=0)
    ids = slots[:, None] * _SLOT + tl.arange(0, _SLOT)[None, :]
    mask = (places < num_open)[:, None] & (ids < vocab_size)
    return ids, tl.div_rn(repaired(_load(logits, edited, use_edited, ids, mask, PENALIZED)), temperature)


@triton.jit
def _count(
    floor,
    logits,
    edited,
    use_edited,
    temperature,
    opened,
    num_open,
    vocab_size,
    TILE: tl.constexpr,
    PENALIZED: tl.constexpr,
):
    count = tl.zeros([TILE, _SLOT], tl.int32)
    for first in range(0, num_open, TILE):
        _, y = _load_open(first, logits, edited, use_edited, temperature, opened, num_open, vocab_size, TILE, PENALIZED)
        count += (y >= floor).to(tl.int32)
    return tl.sum(count)


@triton.jit
def _kth_floor(
    logits,
    edited,
    use_edited,
    temperature,
    opened,
    num_open,
    vocab_size,
    largest,
    floor,
    k,
    TILE: tl.constexpr,
    PENALIZED: tl.constexpr,
):
    """A value that the k largest tokens and their equals reach, and no others; `floor` if no more than k reach that."""
    low, high = _sortable(floor), _sortable(largest) + 1
    count = _count(floor, logits, edited, use_edited, temperature, opened, num_open, vocab_size, TILE, PENALIZED)
    while (high - low > 1) & (count > k):
        middle = (low + high) >> 1
        reaching = _count(
            _unsortable(middle), logits, edited, use_edited, temperature, opened, num_open, vocab_size, TILE, PENALIZED
        )
        if reaching >= k:
            low, count = middle, reaching
        else:
            high = middle
    return _unsortable(low)


@triton.jit
def _draw_before(
    last_id,
    last_y,
    floor,
    largest,
    logits,
    edited,
    use_edited,
    temperature,
    low,
    high,
    opened,
    num_open,
    vocab_size,
    TILE: tl.constexpr,
    PENALIZED: tl.constexpr,
):
    """(mass, id drawn, its logit) of the tokens that reach the floor and come before the last one drawn."""
    mass = tl.zeros([TILE, _SLOT], tl.float32)
    best, best_id, best_y = float("-inf"), _NO_ID, float("-inf")
    for first in range(0, num_open, TILE):
        ids, y = _load_open(
            first, logits, edited, use_edited, temperature, opened, num_open, vocab_size, TILE, PENALIZED
        )
        is_before = (y >= floor) & ((y > last_y) | ((y == last_y) & (ids < last_id)))
        y = tl.where(is_before, y, float("-inf"))
        mass += tl.exp(y - largest)
        u = _uniform(ids, low, high)
        if _largest_bound(y, 1.0, u) >= best:
            score = y + _noise(u)
            top = tl.max(score)
            if top > best:
                best, best_id = top, tl.min(tl.where(score == top, ids, _NO_ID))
                best_y = tl.max(tl.where(ids == best_id, y, float("-inf")))
    return tl.sum(mass), best_id, best_y
