"""How a mixture's experts are computed: one file per way (a backend), chosen for the device by `worker/choose.py`.

A backend is a module with `why_not(device, dtype)`: why it cannot be used, or None; `router_logits` and `route` as in
`ops/routing/reference.py`; and `run`, which is `experts` of `ops/moe/reference.py`. Its weights are those that the
methods chosen for the same device give (`Method.experts`).
"""
