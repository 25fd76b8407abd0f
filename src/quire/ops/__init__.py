"""Kernels as pure functions: in Triton, for GPUs; `ref/` in plain torch (oracle and fallback); `cpu/` compiled for this machine.

Modules that one is chosen from (worker/choose.py) say in `why_not` why they cannot be used, if so.
"""
