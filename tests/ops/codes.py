"""Compares 8-bit codes of two kernels: a last bit before rounding can change a code by one step."""

import torch
from torch import Tensor

from quire.ops.rounding.reference import FLOAT8


def one_step_apart(ours: Tensor, theirs: Tensor) -> int:
    """How many codes differ; none may by more than one step."""
    ours, theirs = ordered(ours), ordered(theirs)
    assert (ours - theirs).abs().max() <= 1
    return int((ours != theirs).sum())


def ordered(codes: Tensor) -> Tensor:
    """Integers in the order of the codes' values, neighbours one apart."""
    if codes.dtype != FLOAT8:
        return codes.int()
    bits = codes.view(torch.uint8).int()
    return torch.where(bits < 128, bits, 128 - bits)
