"""Kernels compile for a card and fit its shared memory.

Needs no card; the interpreter of the other tests checks neither.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.long import LONG

ROOT = Path(__file__).parents[2]
# Of a program, by compute capability: of the smallest cards, and of those that tiles are tuned on.
SHARED_BYTES = {"8.9": 99 << 10, "9.0": 227 << 10}
WARP_SUMS_BYTES = 64
# By the groups of compiled.py.
KERNELS = {
    "experts": {
        "_few_gate_up_kernel",
        "_few_down_kernel",
        "_count_kernel",
        "_sort_kernel",
        "_grouped_kernel",
        "_add_up_kernel",
    },
    "packed": {"_whole_kernel", "_words_kernel", "_tiles_kernel", "_round_kernel", "_rescale_kernel", "_unpack_kernel"},
    "packed_experts": {
        "_whole_kernel",
        "_words_kernel",
        "_sort_kernel",
        "_tiles_kernel",
        "_round_kernel",
        "_add_up_kernel",
    },
    "overlapped": {"_sorted_rows_kernel", "_overlapped_tiles_kernel"},
    "few_rows": {"_few_rows_kernel"},
    "routers": {"_logits_kernel", "_route_kernel"},
    "attentions": {"_attention"},
    "latents": {"_latent_attention"},
    "rounded_caches": {
        "_rope_and_write_kernel",
        "_coded_attention",
        "_norm_rope_and_write_kernel",
        "_latent_attention",
    },
}
ONLY_HOPPER = ("overlapped", "few_rows")
SHORT = ("packed", "experts", "attentions", "few_rows")
CASES = [
    pytest.param(capability, group, marks=[] if capability == "9.0" and group in SHORT else LONG)
    for group in KERNELS
    for capability in SHARED_BYTES
    if capability == "9.0" or group not in ONLY_HOPPER
]


@pytest.mark.parametrize(("capability", "group"), CASES)
def test_kernels_compile_for_a_card_and_fit_it(capability: str, group: str, tmp_path) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": "src"}
    command = [sys.executable, "-m", "tests.ops.compiled", capability, group]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    compiled = [json.loads(line) for line in done.stdout.splitlines()]
    assert {kernel["kernel"] for kernel in compiled} == KERNELS[group]
    assert not [kernel for kernel in compiled if kernel["shared_bytes"] > SHARED_BYTES[capability]]
    # Threads of this kernel have what they multiply: only sums of few warps pass through shared memory.
    assert not [
        kernel
        for kernel in compiled
        if kernel["kernel"] == "_words_kernel" and kernel["shared_bytes"] > WARP_SUMS_BYTES
    ]
