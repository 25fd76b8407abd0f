"""Latent attention (`layers/mla.py`): one file per way to compute it, a backend as in `layers/attention/base.py`.

Instead of `rope_and_write` and `paged_attention` it has `norm_rope_and_write`, `head_linear` and `latent_attention`, as
in `ops/mla/reference.py`.
"""
