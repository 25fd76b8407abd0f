"""Quantized weights: one file per way to keep forms, chosen for the device and the use (worker/choose.py, build.py).

Each has METHOD, a `Quantized`, and `why_not(device, dtype)`: why it cannot be used, if so.
"""
