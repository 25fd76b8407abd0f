"""Quantized weights: one file per way to keep forms, chosen for the device and the use (worker/choose.py, build.py).

Each has METHOD, a `Quantized`, and EXPERTS, the same for the weights of experts; `why_not(device, dtype)` tells why it
cannot be used, if so.
"""
