"""Which accelerators this process can use, asked without importing torch."""

import ctypes
import functools
import importlib.util
import re
from pathlib import Path


@functools.cache
def num_gpus() -> int:
    """NVIDIA GPUs that the driver shows this process; 0 where there is none or it does not answer."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value


@functools.cache
def torch_has_cuda() -> bool:
    """Whether the installed torch was built for NVIDIA GPUs: its version file says so."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    return re.search(r"^cuda\b[^=]*=\s*['\"]", text, re.MULTILINE) is not None
