"""Triton kernels for NVIDIA GPUs (on a CPU only in Triton's interpreter): float32 and 16-bit floats."""

import torch

from quire.ops.launch import INTERPRETED
from quire.ops.moe import experts as run
from quire.ops.routing import route, router_logits

__all__ = ["route", "router_logits", "run", "supports"]


def supports(dtype: torch.dtype, device: torch.device) -> bool:
    return dtype in (torch.float32, torch.float16, torch.bfloat16) and (device.type == "cuda" or INTERPRETED)
