"""One token per sample on a GPU, in Triton, written where the next step reads it; twin: `ops/sampling/reference.py`.

Called by the sampler, also inside a CUDA graph. Knows logits, columns of parameters and token histories; nothing of
requests. A sample's token depends on its row and position alone: not on other samples, nor on how the work is divided.

    penalized rows    logits ──► float32 copy ──┐
    other rows        logits ──────────────────┴► greedy, random: `_choose_kernel`, one launch, logits read once
                                                └► restricted: `triton_restricted.py`

Nothing is sorted. Noise is computed only where a token can win: an upper bound costs a tenth of the noise's two
logarithms.

Letters: S samples of the step, V vocabulary.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.launch import options, pdl, wait_turn
from quire.ops.sampling.penalties import is_penalized, penalize, repaired
from quire.ops.sampling.reference import SamplerColumns
from quire.ops.sampling.triton_restricted import choose_restricted, padded_slots
from quire.ops.sampling.triton_rows import (
    LEAST_TEMPERATURE,
    NO_ID,
    append_token,
    argmax,
    is_restricted,
    largest_bound,
    load_logits,
    noise_of,
    row_key,
    sortable,
    uniform,
    unsortable,
)

__all__ = ["SamplerColumns", "Scratch", "sample"]

NUM_PROGRAMS = 1024  # of `_choose_kernel`, for all rows of a step
MAX_SPLITS = 256  # the most programs that share a row


def choose_config(num_rows: int, vocab_size: int) -> tuple[int, int, int]:
    """(tokens of a tile, tiles of a program, warps)."""
    block = 1024
    tiles = triton.cdiv(vocab_size, block)
    splits = min(max(NUM_PROGRAMS // num_rows, 1), MAX_SPLITS, tiles)
    return block, triton.cdiv(tiles, splits), 4


class Scratch:
    """Memory of the kernels of one engine whose steps have up to `num_rows` rows.

    What rare stages need is allocated when first used. Restricted rows take V / 5 bytes each (8 MB for 256 rows of
    151,936), penalized ones 4 V (156 MB).
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device | str) -> None:
        self.shape, self._device = (num_rows, vocab_size), device
        self.num_slots = padded_slots(vocab_size)
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
    if restricted:
        surveyed = *source, rows_S, columns, *strides
        choose_restricted(num_rows, surveyed, given, scratch.slots, scratch.opened, flags)


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
        if is_restricted(columns, float_at, int_at, vocab_size):
            return
    logits += s.to(tl.int64) * logits_stride
    edited += s.to(tl.int64) * vocab_size
    use_edited = is_penalized(columns, float_at) if PENALIZED else False
    position = tl.load(positions + s)
    begin = split * length
    end = tl.minimum(begin + length, vocab_size)
    if RANDOM:
        temperature = tl.load(columns.temperature + float_at)
        if temperature >= LEAST_TEMPERATURE:
            low, high = row_key(columns, int_at, position)
            best, best_id = _draw(logits, edited, use_edited, begin, end, temperature, low, high, BLOCK, PENALIZED)
        else:
            best, best_id = argmax(logits, edited, use_edited, begin, end, BLOCK, PENALIZED)
    else:
        best, best_id = argmax(logits, edited, use_edited, begin, end, BLOCK, PENALIZED)

    # One integer that orders by score, then by lower id.
    partial += s * num_splits
    tl.store(partial + split, (sortable(best) << 32) | (best_id ^ NO_ID))
    if tl.atomic_add(arrived + s, 1, sem="acq_rel") == num_splits - 1:
        tl.store(arrived + s, 0)
        at = tl.arange(0, SPLITS)
        found = tl.load(partial + at, mask=at < num_splits, other=-(2**63), cache_modifier=".cg")
        key = tl.max(found)
        token_id = ((key & NO_ID) ^ NO_ID).to(tl.int32)
        if PENALIZED:
            if unsortable(key >> 32) == float("-inf"):
                _, token_id = argmax(logits, logits, False, 0, vocab_size, BLOCK, False)
        append_token(out, tokens, tokens_stride, max_len, s, row, position, token_id)


@triton.jit
def _draw(logits, edited, use_edited, begin, end, temperature, low, high, BLOCK: tl.constexpr, PENALIZED: tl.constexpr):
    """The largest score of the row's tokens from `begin` to `end`, and the lowest id that has it."""
    at = tl.arange(0, BLOCK)
    best, best_id = tl.full((), float("-inf"), tl.float32), begin
    next_x = load_logits(logits, edited, use_edited, begin + at, begin + at < end, PENALIZED)
    for start in range(begin, end, BLOCK):
        ids = start + at
        x = next_x
        next_x = load_logits(logits, edited, use_edited, ids + BLOCK, ids + BLOCK < end, PENALIZED)
        u = uniform(ids, low, high)
        if largest_bound(x, 1.0 / temperature, u) >= best:
            score = tl.div_rn(repaired(x), temperature) + noise_of(u)
            top = tl.max(score)
            if top > best:
                best, best_id = top, tl.min(tl.where(score == top, ids, NO_ID))
    return best, best_id
