"""Which accelerators this process can use, asked without importing torch."""

import ctypes
import functools
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

# Errors of the CUDA driver that mean: there is no GPU.
_NO_DEVICE = 100
_STUB_LIBRARY = 34


@dataclass(frozen=True)
class Gpus:
    """The NVIDIA GPUs of this machine, as far as they can be used."""

    count: int  # of those that can be used
    problem: str = ""  # why those that are there cannot be used, if so: half a sentence for people
    is_broken: bool = False  # the problem is the card's or its driver's, not a matter of installing


@functools.cache
def gpus() -> Gpus:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Gpus(0)
    count = ctypes.c_int(0)
    error = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    if error and error not in (_NO_DEVICE, _STUB_LIBRARY):
        return Gpus(0, f"the NVIDIA driver answers with error {error}: see nvidia-smi", is_broken=True)
    if error or not count.value:
        return Gpus(0)
    if not _torch_has_cuda():
        return Gpus(0, "the installed torch is a CPU build: install one for CUDA to use the GPU")
    return Gpus(count.value)


def _torch_has_cuda() -> bool:
    """Whether the installed torch was built for NVIDIA GPUs: its version file says so."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    return re.search(r"^cuda\b[^=]*=\s*['\"]", text, re.MULTILINE) is not None
