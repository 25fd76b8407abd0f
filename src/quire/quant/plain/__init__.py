"""Weights that are not quantized: one file per way to keep them, chosen for the device (worker/choose.py).

Each has METHOD, and `why_not(device, dtype)`: why it cannot be used, if so.
"""
