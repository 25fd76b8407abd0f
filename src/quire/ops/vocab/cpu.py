"""Compiled kernels over a vocabulary; twins, with the same ids: `gumbel.py`, `reference.py` of `ops/vocab`, `ops/mask`.

Called by `ops/sampling/cpu.py` and by `sampling/`. These functions take anything: what the kernels do not take (another
dtype or device, no compiler), the twins do. Knows rows of numbers, nothing of requests.

A draw gives the twin's id although its logarithms differ from the twin's in the last bits. The kernel computes in
float64 and leaves a row to the twin where the two best scores are too close for float32 to tell apart: in about 30 of a
million draws.
"""

import ctypes
import functools
from types import SimpleNamespace

import torch
from torch import Tensor

from quire.ops.cpu.tape import Rows, compiled
from quire.ops.mask import reference as mask
from quire.ops.sampling import gumbel
from quire.ops.sampling.reference import VERY_LARGE
from quire.ops.vocab import reference as vocab

_PTR, _INT = ctypes.c_void_p, ctypes.c_int64


@functools.cache
def _kernels() -> SimpleNamespace:
    return compiled(
        "sampling",
        argmax=[_PTR, _INT, Rows, _INT, _PTR, _PTR],
        topk=[_PTR, _INT, Rows, _INT, _INT, _PTR, _PTR],
        gumbel_argmax=[_PTR, _INT, *[_PTR] * 3, Rows, _INT, _PTR],
        mask_logits=[_PTR, _INT, _PTR, _PTR, Rows, _INT],
    )


def supported(x_RV: Tensor) -> bool:
    """Whether the compiled kernels exist on this machine and take these rows."""
    if x_RV.device.type != "cpu" or x_RV.dtype != torch.float32:
        return False
    return x_RV.stride(1) == 1 and x_RV.shape[1] > 0 and _kernels().available


def row_argmax(x_RV: Tensor) -> tuple[Tensor, Tensor]:
    """Maximum and its lowest index per row. A NaN counts as the largest value, as in torch."""
    if not supported(x_RV):
        return vocab.row_argmax(x_RV)
    rows, width = x_RV.shape
    top_R, ids_R = x_RV.new_empty(rows), x_RV.new_empty(rows, dtype=torch.int64)
    _kernels().argmax(x_RV.data_ptr(), x_RV.stride(0), rows, width, top_R.data_ptr(), ids_R.data_ptr())
    return top_R, ids_R


def repaired_argmax(logits_RV: Tensor) -> tuple[Tensor, Tensor]:
    """`row_argmax` of logits, after replacing, in place, NaN by -inf and +inf by a very large number.

    Not on a GPU, where looking for them would wait for the device; its sampler replaces them as it reads.
    """
    top_R, ids_R = row_argmax(logits_RV)
    if logits_RV.is_cuda or bool(top_R.isfinite().all()):
        return top_R, ids_R
    very_large = min(VERY_LARGE, torch.finfo(logits_RV.dtype).max)
    return row_argmax(logits_RV.nan_to_num_(nan=-torch.inf, posinf=very_large, neginf=-torch.inf))


def mask_logits(logits_SV: Tensor, places_M: Tensor, words_MW: Tensor) -> None:
    """Forbids, in rows `places_M`, the tokens whose bit is 0."""
    width = logits_SV.shape[1]
    if not supported(logits_SV) or words_MW.shape[1] != -(-width // 32):
        mask.mask_logits(logits_SV, places_M, words_MW)
        return
    places_M, words_MW = places_M.contiguous(), words_MW.contiguous()
    _kernels().mask_logits(
        logits_SV.data_ptr(), logits_SV.stride(0), places_M.data_ptr(), words_MW.data_ptr(), len(places_M), width
    )


def row_topk(x_RV: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest entries and their ids, [R, K], in descending order; of equals the lower id first. No NaN."""
    rows, width = x_RV.shape
    if not supported(x_RV) or not 0 < k <= width // 4:  # torch sorts faster where much of the row is asked for
        return vocab.row_topk(x_RV, k)
    top_RK, ids_RK = x_RV.new_empty(rows, k), x_RV.new_empty(rows, k, dtype=torch.int64)
    _kernels().topk(x_RV.data_ptr(), x_RV.stride(0), rows, width, k, top_RK.data_ptr(), ids_RK.data_ptr())
    return top_RK, ids_RK


def gumbel_argmax(
    logits_RV: Tensor,
    temperature_R: Tensor,
    seeds_R: Tensor,
    positions_R: Tensor,
    choices_R: Tensor,
    words_V: Tensor | None = None,
) -> Tensor:
    """The twin's draw from softmax(logits / temperature), without a separate pass that divides the logits."""
    words_V = gumbel.token_words(logits_RV.shape[1], logits_RV.device) if words_V is None else words_V

    def twin(rows: slice | Tensor) -> Tensor:
        key = seeds_R[rows], positions_R[rows], choices_R[rows]
        return gumbel.gumbel_argmax(logits_RV[rows] / temperature_R[rows, None], *key, words_V=words_V)

    if not supported(logits_RV):
        return twin(slice(None))
    rows, width = logits_RV.shape
    key_R = gumbel.row_key(seeds_R, positions_R, choices_R)
    ids_R, temperature_R = torch.empty_like(key_R), temperature_R.contiguous()
    _kernels().gumbel_argmax(
        logits_RV.data_ptr(),
        logits_RV.stride(0),
        temperature_R.data_ptr(),
        words_V.data_ptr(),
        key_R.data_ptr(),
        rows,
        width,
        ids_R.data_ptr(),
    )
    if len(unsure := (ids_R < 0).nonzero()[:, 0]):
        ids_R[unsure] = twin(unsure)
    return ids_R
