"""Triton kernels for NVIDIA GPUs (on a CPU only in Triton's interpreter): float32 and 16-bit floats."""

import torch

from quire.ops.moe.triton import experts as run
from quire.ops.routing.triton import route, router_logits

__all__ = ["route", "router_logits", "run", "why_not"]


def why_not(device: torch.device, dtype: torch.dtype) -> str | None:
    return None if dtype in (torch.float32, torch.float16, torch.bfloat16) else f"it has no kernel for {dtype}"
