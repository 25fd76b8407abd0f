"""Weights that are not quantized: one file per way to keep them, chosen for the device (worker/choose.py).

Each has METHOD, which makes the method of a weight, EXPERTS, the same for the weights of experts, and
`why_not(device, dtype)`: why it cannot be used, if so.
"""
