"""Compiled kernels for CPUs, one expert after another, each with its own packed weights: bfloat16, or codes."""

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from quire.ops.moe.reference import experts
from quire.ops.packed_linear import cpu as linear
from quire.ops.routing.reference import route, router_logits

__all__ = ["route", "router_logits", "run", "why_not"]

why_not = linear.why_not


def _multiply(x: Tensor, weights: list[linear.PackedWeight] | Tensor, bias: Tensor | None) -> Tensor:
    """A tensor: of experts whose parts are kept in different ways."""
    if isinstance(weights, Tensor):
        return functional.linear(x, weights, bias)
    y = [linear.linear(x, weight) for weight in weights]
    joined = y[0] if len(y) == 1 else torch.cat(y, -1)
    return joined if bias is None else joined + bias


run = partial(experts, multiply=_multiply)
