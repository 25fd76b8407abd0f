"""How a mixture's experts are computed: one file per way (a backend), chosen for the device by `worker/build.py`.

A backend is a module with `supports(dtype, device)`, `router_logits` and `route` as in `ops/ref/routing.py` and `run`, which is `experts` of `ops/ref/moe.py`.
"""

PREFERRED = {"cpu": ("torch",), "cuda": ("triton", "torch")}
