"""What kernels in Gluon for Hopper share: the copy engine fills a ring of slots in shared memory, step after step.

Used by `linear/rows_hopper.py` and `packed_linear/tiles_hopper.py`. A slot has a block of a weight's rows (of a gated
layer two: gates, and the ups N rows behind them), a block of the inputs they are multiplied by, and a barrier that
tells when both have arrived. Knows tensors only.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

GLUON_TYPES = {
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.float8_e4m3fn: gl.float8e4nv,
    torch.int32: gl.int32,
}
wait_for_all_warps = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # Triton 3.7 and 3.6


def described(tensor: Tensor, num_rows: int, num_columns: int) -> TensorDescriptor:
    """For the copy engine: blocks of a matrix, zeros past its end."""
    block = [num_rows, num_columns]
    layout = gl.NVMMASharedLayout.get_default_for(block, GLUON_TYPES[tensor.dtype])
    return TensorDescriptor.from_tensor(tensor, block, layout)


@gluon.jit
def new_barriers(STAGES: gl.constexpr):
    """One for each slot."""
    arrived = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(arrived.index(slot), count=1)
    fence_async_shared()
    wait_for_all_warps()
    return arrived


@gluon.jit
def ask_for_weights(
    weight_desc, weights, x_desc, arrived, first_row, step, slot, N, HALVES: gl.constexpr, COLUMNS: gl.constexpr, wanted
):
    """`arrived` will tell when these and the step's inputs are there; COLUMNS: of the weight, in a step."""
    here = arrived.index(slot)
    mbarrier.expect(here, HALVES * weight_desc.block_type.nbytes + x_desc.block_type.nbytes, pred=wanted)
    for half in gl.static_range(HALVES):
        at = [first_row + half * N, step * COLUMNS]
        tma.async_copy_global_to_shared(weight_desc, at, here, weights.index(slot * HALVES + half), pred=wanted)


@gluon.jit
def ask_for_inputs(x_desc, x, arrived, first_row, step, slot, INPUTS: gl.constexpr, wanted):
    at = [first_row, step * INPUTS]
    tma.async_copy_global_to_shared(x_desc, at, arrived.index(slot), x.index(slot), pred=wanted)
