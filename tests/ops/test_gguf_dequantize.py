"""Every GGUF type against the `gguf` package, the format's own Python tools, bit for bit."""

import gguf
import numpy as np
import pytest
import torch

from quire.checkpoint.gguf import BLOCK
from quire.ops.dequantize.gguf import dequantize

TYPES = sorted(BLOCK)
# Where in a block its float16 scales lie; everything else may be any byte.
HALVES = {
    "F16": [0], "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0],
    "Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "IQ4_NL": [0], "IQ4_XS": [0],
}  # fmt: skip
EXTREMES = np.array([0.0, -0.0, 6e-8, -6e-8, 6.1e-5, 1.0, -1.0, 65504.0, -65504.0], np.float16)


def random_blocks(type_name: str, num_blocks: int, scales: np.ndarray | None = None) -> np.ndarray:
    """Random bytes, uint8 [num_blocks, block bytes], with finite float16 scales (from `scales`, else any)."""
    rng = np.random.default_rng(num_blocks)
    blocks = rng.integers(0, 256, (num_blocks, BLOCK[type_name][1]), np.uint8)
    for start in HALVES.get(type_name, []):
        half = np.ascontiguousarray(blocks[:, start : start + 2]).view(np.float16)
        if scales is None:
            half = np.where(np.isfinite(half), half, np.float16(1))
        else:
            half = rng.choice(scales, half.shape)
        blocks[:, start : start + 2] = half.view(np.uint8)
    if type_name == "MXFP4":
        blocks[:, 0] = np.minimum(blocks[:, 0], 254)  # 255 is no number
    return blocks


def truth(type_name: str, blocks: np.ndarray) -> torch.Tensor:
    values = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[type_name])
    return torch.from_numpy(values.copy()).flatten()


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.flatten().view(torch.int32)


@pytest.mark.parametrize("type_name", TYPES)
@pytest.mark.parametrize("scales", [None, EXTREMES], ids=["any", "extreme"])
def test_a_type_dequantizes_to_the_same_bits_as_the_gguf_package(type_name: str, scales: np.ndarray | None) -> None:
    blocks = random_blocks(type_name, 997, scales)
    values = dequantize(type_name, torch.from_numpy(blocks).flatten(), (997, BLOCK[type_name][0]))
    assert torch.equal(bits(values), bits(truth(type_name, blocks)))


@pytest.mark.parametrize("type_name", TYPES)
def test_the_block_table_is_that_of_the_gguf_package(type_name: str) -> None:
    assert BLOCK[type_name] == gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_name]]


@pytest.mark.parametrize("type_name", TYPES)
@pytest.mark.parametrize("num_blocks", [1, 2])
def test_the_smallest_tensors_are_read(type_name: str, num_blocks: int) -> None:
    blocks = random_blocks(type_name, num_blocks)
    values = dequantize(type_name, torch.from_numpy(blocks), (num_blocks, BLOCK[type_name][0]))
    assert torch.equal(bits(values), bits(truth(type_name, blocks)))


@pytest.mark.parametrize("type_name", TYPES)
def test_a_tensor_longer_than_one_chunk_is_read_whole(type_name: str) -> None:
    elements = BLOCK[type_name][0]
    num_blocks = (1 << 16) // elements + 3
    blocks = random_blocks(type_name, num_blocks)
    values = dequantize(type_name, torch.from_numpy(blocks), (num_blocks * elements,))
    assert torch.equal(bits(values), bits(truth(type_name, blocks)))


def test_what_the_gguf_package_quantizes_comes_back_close() -> None:
    weights = np.random.default_rng(0).standard_normal((64, 256), np.float32)
    for type_name, tolerance in {"Q8_0": 0.02, "Q5_1": 0.15, "Q5_0": 0.2, "Q4_1": 0.3, "Q4_0": 0.4}.items():
        raw = torch.from_numpy(gguf.quants.quantize(weights, gguf.GGMLQuantizationType[type_name]))
        values = dequantize(type_name, raw, weights.shape)
        assert (values - torch.from_numpy(weights)).abs().max() < tolerance


def test_another_dtype_is_the_float32_value_rounded_once() -> None:
    blocks = torch.from_numpy(random_blocks("Q4_K", 50, np.array([0.01, -0.02], np.float16)))
    exact = dequantize("Q4_K", blocks, (50, 256))
    assert torch.equal(dequantize("Q4_K", blocks, (50, 256), torch.bfloat16), exact.bfloat16())


def test_values_can_be_written_into_rows_of_a_larger_tensor() -> None:
    blocks = torch.from_numpy(random_blocks("Q4_1", 40, np.array([0.5], np.float16)))
    fused = torch.zeros(30, 64, dtype=torch.bfloat16)
    dequantize("Q4_1", blocks, (20, 64), out=fused[10:])
    assert torch.equal(fused[10:], dequantize("Q4_1", blocks, (20, 64)).bfloat16())
    assert not fused[:10].any()


@pytest.mark.parametrize("type_name", TYPES)
def test_bytes_at_an_odd_address_are_read_as_well(type_name: str) -> None:
    blocks = torch.from_numpy(random_blocks(type_name, 6))
    shifted = torch.cat([torch.zeros(1, dtype=torch.uint8), blocks.flatten()])[1:]
    shape = (6 * BLOCK[type_name][0],)
    assert torch.equal(bits(dequantize(type_name, shifted, shape)), bits(dequantize(type_name, blocks, shape)))


@pytest.mark.parametrize("num_bytes", [0, 19, 21, 60])
def test_bytes_that_do_not_make_the_shape_are_refused(num_bytes: int) -> None:
    with pytest.raises(ValueError, match="not a Q4_1 tensor"):
        dequantize("Q4_1", torch.zeros(num_bytes, dtype=torch.uint8), (2, 32))
