"""Plain torch, one expert after another: any dtype, any device, but it waits for the device and cannot be recorded."""

import torch

from quire.ops.moe.reference import experts as run
from quire.ops.routing.reference import route, router_logits

__all__ = ["route", "router_logits", "run", "why_not"]


def why_not(device: torch.device, dtype: torch.dtype) -> str | None:
    return None
