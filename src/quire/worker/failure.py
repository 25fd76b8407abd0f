"""Errors of a GPU that fails while it runs, as one sentence for people instead of the driver's message.

Wrapped around everything that launches work or waits for it. After such an error nothing works on the device in this
process: the core ends, and a server starts another.
"""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from quire.errors import EngineError

P = ParamSpec("P")
T = TypeVar("T")


def first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0][:200]


def explain_gpu_errors(run: Callable[P, T]) -> Callable[P, T]:
    @functools.wraps(run)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return run(*args, **kwargs)
        except torch.OutOfMemoryError:
            raise EngineError(
                "the GPU's memory ended in the middle of a step: lower --gpu-memory-utilization, or stop what else "
                "runs there (nvidia-smi shows it)"
            ) from None
        except RuntimeError as error:  # torch.AcceleratorError, or Triton's, which is a plain RuntimeError
            if not isinstance(error, torch.AcceleratorError) and "CUDA" not in str(error):
                raise
            raise EngineError(
                f"the GPU was lost, or a kernel failed ({first_line(error)}): "
                "see nvidia-smi and the system's log, then start again"
            ) from None

    return wrapped
