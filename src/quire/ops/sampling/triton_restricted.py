"""Random rows with min_p, top_k or top_p, on a GPU: the second half of `triton.py`, which launches it.

A restricted row is divided into slots of 64 tokens. From the slots' maxima and masses follows a floor that all kept
tokens reach; only slots that reach it are opened, that is, read again. Then tokens are drawn one after another, each
from those more likely than the last one, until one lies inside top_p. That is the token that wins among the kept ones.
It takes 1 + ln(1 / top_p) draws on average, and no search for top_p's limit.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.launch import wait_turn
from quire.ops.sampling.penalties import is_penalized, repaired
from quire.ops.sampling.triton_rows import (
    NO_ID,
    append_token,
    argmax,
    exact_log,
    is_restricted,
    largest_bound,
    load_logits,
    noise_of,
    row_key,
    sortable,
    uniform,
    unsortable,
)

SLOT = 64  # tokens; in bfloat16 they are one cache line
CHUNK_SLOTS = 64  # slots surveyed by one program
# The order in which masses are added depends on these, so they are the same for any number of rows.
SURVEY_WARPS = 8
RESTRICTED_TILE = 32  # slots
RESTRICTED_WARPS = 8

_SLOT = tl.constexpr(SLOT)
_LOWEST = tl.constexpr(-torch.finfo(torch.float32).max)


def padded_slots(vocab_size: int) -> int:
    """How many slots a row is divided into: a multiple of what one program surveys."""
    return triton.cdiv(vocab_size, SLOT * CHUNK_SLOTS) * CHUNK_SLOTS


def choose_restricted(
    num_rows: int,
    surveyed: tuple[Any, ...],
    given: tuple[Any, ...],
    slots_2SN: Tensor,
    opened_SN: Tensor,
    flags: dict[str, Any],
) -> None:
    """`surveyed` and `given`: the first arguments of the two kernels, up to the columns' strides."""
    num_slots = slots_2SN.shape[-1]
    slot_max, slot_mass = slots_2SN
    grid = num_rows, num_slots // CHUNK_SLOTS
    _survey_kernel[grid](*surveyed, slot_max, slot_mass, num_slots, CHUNK=CHUNK_SLOTS, num_warps=SURVEY_WARPS, **flags)
    _choose_restricted_kernel[(num_rows,)](
        *given,
        slot_max,
        slot_mass,
        opened_SN,
        num_slots,
        SLOTS=triton.next_power_of_2(num_slots),
        TILE=RESTRICTED_TILE,
        num_warps=RESTRICTED_WARPS,
        **flags,
    )


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
    if not is_restricted(columns, float_at, int_at, vocab_size):
        return
    use_edited = is_penalized(columns, float_at) if PENALIZED else False
    temperature = tl.load(columns.temperature + float_at)
    logits += s.to(tl.int64) * logits_stride
    edited += s.to(tl.int64) * vocab_size
    slots = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    ids = slots[:, None] * _SLOT + tl.arange(0, _SLOT)[None, :]
    x = load_logits(logits, edited, use_edited, ids, ids < vocab_size, PENALIZED)
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
    if not is_restricted(columns, float_at, int_at, vocab_size):
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
            _, token_id = argmax(logits, logits, False, 0, vocab_size, TILE * _SLOT, False)
        append_token(out, tokens, tokens_stride, max_len, s, row, position, token_id)
        return
    mass_of = tl.load(slot_mass + at, mask=slots < num_slots, other=0.0) * tl.exp(max_of - largest)
    whole = tl.sum(mass_of)

    # A floor that every kept token reaches, as high as can be told from the slots.
    min_p_floor = tl.where(min_p > 0.0, largest + exact_log(tl.maximum(min_p, 1e-37)), _LOWEST)
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
    low, high = row_key(columns, int_at, position)
    given = logits, edited, use_edited, temperature, low, high, opened, num_open, vocab_size
    mass, token_id, token_y = _draw_before(NO_ID, float("-inf"), floor, largest, *given, TILE, PENALIZED)
    # Without top_p, the first token drawn is kept. (Only these three values are carried through the loop: with the next
    # token carried as well, Triton 3.6 returned the wrong one of the two.)
    limit = top_p * tl.where(only_top_p, whole, mass)
    is_outside = top_p < 1.0
    while is_outside:
        mass_before, next_id, next_y = _draw_before(token_id, token_y, floor, largest, *given, TILE, PENALIZED)
        is_outside = mass_before >= limit
        token_id = tl.where(is_outside, next_id, token_id)
        token_y = tl.where(is_outside, next_y, token_y)
    append_token(out, tokens, tokens_stride, max_len, s, row, position, token_id)


@triton.jit
def _rough_kth_floor(max_of, largest, floor, k):
    """A value that the maxima of at least k slots reach, and not many more: so at least k tokens reach it.

    `floor`, if fewer than k slots reach that.
    """
    low, high = sortable(floor), sortable(largest) + 1
    count = tl.sum((max_of >= floor).to(tl.int32))
    while (high - low > 1) & (count > k + k // 8):
        middle = (low + high) >> 1
        reaching = tl.sum((max_of >= unsortable(middle)).to(tl.int32))
        if reaching >= k:
            low, count = middle, reaching
        else:
            high = middle
    return unsortable(low)


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
    return ids, tl.div_rn(repaired(load_logits(logits, edited, use_edited, ids, mask, PENALIZED)), temperature)


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
    low, high = sortable(floor), sortable(largest) + 1
    count = _count(floor, logits, edited, use_edited, temperature, opened, num_open, vocab_size, TILE, PENALIZED)
    while (high - low > 1) & (count > k):
        middle = (low + high) >> 1
        reaching = _count(
            unsortable(middle), logits, edited, use_edited, temperature, opened, num_open, vocab_size, TILE, PENALIZED
        )
        if reaching >= k:
            low, count = middle, reaching
        else:
            high = middle
    return unsortable(low)


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
    best, best_id, best_y = float("-inf"), NO_ID, float("-inf")
    for first in range(0, num_open, TILE):
        ids, y = _load_open(
            first, logits, edited, use_edited, temperature, opened, num_open, vocab_size, TILE, PENALIZED
        )
        is_before = (y >= floor) & ((y > last_y) | ((y == last_y) & (ids < last_id)))
        y = tl.where(is_before, y, float("-inf"))
        mass += tl.exp(y - largest)
        u = uniform(ids, low, high)
        if largest_bound(y, 1.0, u) >= best:
            score = y + noise_of(u)
            top = tl.max(score)
            if top > best:
                best, best_id = top, tl.min(tl.where(score == top, ids, NO_ID))
                best_y = tl.max(tl.where(ids == best_id, y, float("-inf")))
    return tl.sum(mass), best_id, best_y
