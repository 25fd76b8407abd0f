"""Kernels as pure functions, one folder per operation.

In a folder, `reference.py` is plain torch (the oracle of tests, and the fallback), `triton.py` is for GPUs and `cpu.py`
calls C++ that is compiled on this machine (`cpu/`). All compute the same: each names the others as its twins.

Where the worker chooses between modules (worker/choose.py), each has a function `why_not`: the reason why it cannot be
used, or None.
"""
