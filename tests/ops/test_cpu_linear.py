"""The packed linear kernels against gguf's own dequantization and float64 products, and against their plain twin."""

import os
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import quire
from quire.errors import ConfigError, UnsupportedModelError
from quire.ops.elementwise import cpu as elementwise
from quire.ops.packed_linear import cpu
from quire.ops.packed_linear import reference as ref

TYPES = sorted(ref.FORMATS)
ROWS = (1, 3, 4, 5, 16, 33, 64, 130)
INTEGER_TOLERANCE = 3e-4  # of the sum of absolute products: x in 16 bits per block, weights exact
BF16_TOLERANCE = 2**-8  # weights rounded to bf16


def random_raw(type_name: str, n: int, k: int, seed: int = 0) -> np.ndarray:
    """Random GGUF bytes with scales of about 0.01."""
    form = ref.FORMATS[type_name]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (n * k // form.block_weights, form.block_bytes), dtype=np.uint8)
    if type_name == "Q6_K":
        places = [208]
    else:
        places = [0, 2] if form.has_min else [0]
    for at in places:
        values = (rng.standard_normal(len(blocks)) * 0.01).astype(np.float16)
        blocks[:, at : at + 2] = values.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(n, -1)


def gguf_weight(type_name: str, raw: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[type_name]))


def relative_error(y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> float:
    """The largest error relative to the sum of absolute products, with which rounding errors grow."""
    x, weight = x.double(), weight.double()
    truth, size = x @ weight.T, x.abs() @ weight.abs().T
    if bias is not None:
        truth, size = truth + bias.double(), size + bias.double().abs()
    return ((y.double() - truth).abs() / size).max().item()


def activations(rows: int, k: int, seed: int = 1) -> torch.Tensor:
    """Some channels are large, as in real activations."""
    x = torch.randn(rows, k, generator=torch.Generator().manual_seed(seed))
    x[:, ::97] *= 30
    return x.bfloat16()


@pytest.mark.parametrize("module", [cpu, ref], ids=["native", "twin"])
@pytest.mark.parametrize("type_name", TYPES)
def test_packing_loses_nothing_of_a_gguf_weight(module, type_name: str):
    for n in (16, 50):
        raw = random_raw(type_name, n, 512)
        w = module.pack_gguf(type_name, torch.from_numpy(raw).flatten(), n, 512)
        assert torch.equal(w.dequantize(), gguf_weight(type_name, raw))


@pytest.mark.parametrize("type_name", TYPES)
def test_twin_and_native_pack_the_same_bytes(type_name: str):
    raw = torch.from_numpy(random_raw(type_name, 40, 256)).flatten()
    native = cpu.pack_gguf(type_name, raw, 40, 256)
    twin = ref.pack_gguf(type_name, raw, 40, 256)
    assert torch.equal(native.data, twin.data) and torch.equal(native.scales, twin.scales)
    assert (native.mins is None and twin.mins is None) or torch.equal(native.mins, twin.mins)
    assert native.nbytes == twin.nbytes > 40 * 256 * native.bits // 8


def test_a_read_only_memory_map_can_be_packed(tmp_path: Path):
    raw = random_raw("Q4_1", 32, 64)
    (tmp_path / "weight").write_bytes(raw.tobytes())
    mapped = np.memmap(tmp_path / "weight", dtype=np.uint8, mode="r")
    with pytest.warns(UserWarning, match="not writable"):
        tensor = torch.from_numpy(mapped)
    assert torch.equal(cpu.pack_gguf("Q4_1", tensor, 32, 64).dequantize(), gguf_weight("Q4_1", raw))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("type_name", TYPES)
def test_products_are_right_for_any_number_of_rows(type_name: str, rows: int):
    n, k = 130, 768  # odd panels, a last panel of two outputs
    raw = random_raw(type_name, n, k)
    w = cpu.pack_gguf(type_name, torch.from_numpy(raw).flatten(), n, k)
    x, weight = activations(rows, k), gguf_weight(type_name, raw)
    few = cpu.supported() and rows <= cpu.FEW_ROWS[w.bits]
    tolerance = INTEGER_TOLERANCE if few else BF16_TOLERANCE
    if cpu.supported():
        assert relative_error(cpu.linear(x, w, out_dtype=torch.float32), x, weight) < tolerance
    assert relative_error(cpu.linear(x, w), x, weight) < tolerance + BF16_TOLERANCE
    assert relative_error(ref.linear(x, w), x, weight) < 2 * BF16_TOLERANCE


@pytest.mark.skipif(not cpu.supported(), reason="asks what the compiled kernels do")
@pytest.mark.parametrize("magnitude", [2.0**-20, 1.0, 2.0**12])
@pytest.mark.parametrize("type_name", ["Q4_0", "Q4_1", "Q5_1", "Q8_0"])
def test_many_rows_see_weights_rounded_to_nearest_and_zeros_as_zeros(type_name: str, magnitude: float):
    w = cpu.pack_gguf(type_name, torch.from_numpy(random_raw(type_name, 48, 96)).flatten(), 48, 96)
    w.scales.copy_((w.scales.float() * magnitude).half())
    w.scales[0, 0] = 0
    if w.mins is not None:
        w.mins.copy_((w.mins.float() * magnitude).half())
        w.mins[0, 0] = 0
    exact = w.dequantize()
    nearest = ((exact.view(torch.int32) + 0x8000) & ~0xFFFF).view(torch.float32)  # halves away from zero
    assert torch.equal(cpu.linear(torch.eye(96).bfloat16(), w, out_dtype=torch.float32).T, nearest)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("type_name", [*TYPES, "dense"])
def test_gating_in_the_same_call_changes_no_bit(type_name: str, rows: int):
    n, k = 96, 512
    if type_name == "dense":
        w = cpu.pack_dense(torch.randn(n, k, generator=torch.Generator().manual_seed(0)))
    else:
        w = cpu.pack_gguf(type_name, torch.from_numpy(random_raw(type_name, n, k)).flatten(), n, k)
    x = activations(rows, k)
    gated = cpu.linear_silu_mul(x, w)
    assert gated.shape == (rows, n // 2) and gated.dtype == torch.bfloat16
    if cpu.supported():
        assert torch.equal(gated, elementwise.silu_mul(cpu.linear(x, w)))
    twin = ref.linear_silu_mul(x, w).float()
    size = gated.abs().max().item()
    assert torch.allclose(gated.float(), twin, rtol=0.05, atol=0.02 * size)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dense_weights_are_multiplied_as_bf16(dtype: torch.dtype, rows: int):
    weight = torch.randn(100, 96, generator=torch.Generator().manual_seed(0)).to(dtype)
    w, x = cpu.pack_dense(weight), activations(rows, 96)
    assert torch.equal(w.data, ref.pack_dense(weight).data)
    assert torch.equal(w.dequantize(), weight.bfloat16().float())
    assert relative_error(cpu.linear(x, w), x, w.dequantize()) < BF16_TOLERANCE


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 70),
    st.integers(1, 6),
    st.integers(1, 70),
    st.sampled_from(["Q4_0", "Q4_1", "Q8_0", "dense"]),
    st.booleans(),
)
def test_any_shape_with_and_without_bias(n: int, num_blocks: int, rows: int, kind: str, with_bias: bool):
    k = num_blocks * 32
    if kind == "dense":
        w = cpu.pack_dense(torch.randn(n, k))
    else:
        w = cpu.pack_gguf(kind, torch.from_numpy(random_raw(kind, n, k)).flatten(), n, k)
    x, bias = activations(rows, k), torch.randn(n) if with_bias else None
    for out_dtype in (torch.bfloat16, torch.float32):
        y = cpu.linear(x, w, bias, out_dtype)
        assert y.shape == (rows, n) and y.dtype == out_dtype
        assert relative_error(y, x, w.dequantize(), bias) < 2.5 * BF16_TOLERANCE


@pytest.mark.parametrize("type_name", ["Q4_1", "Q6_K", "Q8_0"])
def test_a_row_does_not_depend_on_the_others_nor_on_threads(type_name: str):
    raw = torch.from_numpy(random_raw(type_name, 144, 768)).flatten()
    w, x = cpu.pack_gguf(type_name, raw, 144, 768), activations(130, 768)
    few = max(1, cpu.FEW_ROWS[w.bits])
    together = cpu.linear(x[:few], w)
    assert torch.equal(together, torch.cat([cpu.linear(row[None], w) for row in x[:few]]))
    many = cpu.linear(x, w)
    for rows in (slice(33, 64), slice(60, 124)):  # one strip and two: chunks of K
        assert torch.equal(many[rows], cpu.linear(x[rows].contiguous(), w))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert torch.equal(many, cpu.linear(x, w)) and torch.equal(together, cpu.linear(x[:few], w))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("rows", [1, 40])
def test_not_a_number_and_infinity_show_in_their_row_only(rows: int):
    w = cpu.pack_gguf("Q4_0", torch.from_numpy(random_raw("Q4_0", 32, 64)).flatten(), 32, 64)
    for bad in (float("nan"), float("inf")):
        x = torch.cat([activations(rows, 64)] * 2)
        clean = cpu.linear(x, w)
        x[0, 3] = bad
        y = cpu.linear(x, w)
        assert not y[0].isfinite().any() and torch.equal(y[1:], clean[1:])


def test_blocks_of_zeros_and_of_tiny_numbers_do_no_harm():
    w = cpu.pack_gguf("Q4_1", torch.from_numpy(random_raw("Q4_1", 16, 96)).flatten(), 16, 96)
    x = activations(1, 96)
    x[:, :32], x[:, 32:64] = 0, 1e-38
    assert relative_error(cpu.linear(x, w, out_dtype=torch.float32), x, w.dequantize()) < BF16_TOLERANCE


def test_products_of_torch_still_work_between_ours():
    """Both use AMX tiles on the same threads, and torch remembers how it configured them."""
    w = cpu.pack_dense(torch.randn(512, 512))
    weight, x = torch.randn(512, 512).bfloat16(), activations(256, 512)
    expected = torch.nn.functional.linear(x, weight)
    for _ in range(3):
        cpu.linear(x, w)
        assert torch.equal(torch.nn.functional.linear(x, weight), expected)


@pytest.mark.parametrize("type_name", ["Q4_1", "Q6_K"])
def test_concatenated_weights_give_concatenated_outputs(type_name: str):
    parts = []
    for n in (48, 16, 20):
        raw = torch.from_numpy(random_raw(type_name, n, 256, n)).flatten()
        parts.append(cpu.pack_gguf(type_name, raw, n, 256))
    fused, x = cpu.concat(parts), activations(7, 256)
    assert fused.n == 84 and torch.equal(fused.dequantize(), torch.cat([w.dequantize() for w in parts]))
    assert torch.equal(cpu.linear(x, fused), torch.cat([cpu.linear(x, w) for w in parts], dim=1))


def test_weights_that_do_not_fit_together_are_refused():
    a, b = (cpu.pack_dense(torch.randn(n, 32)) for n in (20, 16))
    q = cpu.pack_gguf("Q8_0", torch.from_numpy(random_raw("Q8_0", 16, 32)).flatten(), 16, 32)
    with pytest.raises(ConfigError, match="multiples of 16"):
        cpu.concat([a, b])
    with pytest.raises(ConfigError, match="different forms"):
        cpu.concat([b, q])


def test_bad_weights_and_inputs_are_refused():
    raw = torch.zeros(100, dtype=torch.uint8)
    assert cpu.packable("Q4_K", 3, 256) and not cpu.packable("Q4_K", 3, 128) and not cpu.packable("Q2_K", 3, 256)
    for type_name, k in (("Q4_K", 128), ("Q2_K", 256), ("Q4_0", 33)):
        with pytest.raises(UnsupportedModelError, match="cannot be packed"):
            cpu.pack_gguf(type_name, raw, 1, k)
    with pytest.raises(ConfigError, match="needs 36 contiguous bytes"):
        cpu.pack_gguf("Q4_0", raw, 2, 32)
    with pytest.raises(UnsupportedModelError, match="multiple of 32"):
        cpu.pack_dense(torch.randn(4, 40))
    w = cpu.pack_dense(torch.randn(4, 64))
    for x in (torch.randn(2, 64), torch.randn(2, 32).bfloat16(), torch.randn(64, 2).bfloat16().T):
        with pytest.raises(ConfigError, match=r"contiguous bfloat16 \[rows, 64\]"):
            cpu.linear(x, w)
    assert cpu.linear(torch.empty(0, 64, dtype=torch.bfloat16), w).shape == (0, 4)
    if cpu.supported():
        with pytest.raises(ConfigError, match="halves of 4 outputs"):
            cpu.linear_silu_mul(torch.empty(1, 64, dtype=torch.bfloat16), w)


# ---- building, in other processes ----

CHECK = """
import sys, torch
from quire.ops.packed_linear import cpu as linear
from quire.ops.cpu import build
w = linear.pack_dense(torch.eye(32))
assert torch.equal(linear.linear(torch.eye(32).bfloat16(), w), torch.eye(32).bfloat16())
runtimes = {line.split()[-1] for line in open("/proc/self/maps") if "libgomp" in line}
print(build.load("linear") is not None, linear.supported(), len(runtimes))
"""


def start(tmp_path: Path, **variables: str) -> subprocess.Popen:
    source = str(Path(quire.__path__[0]).parent)
    environment = os.environ | {"PYTHONPATH": source, "QUIRE_CACHE": str(tmp_path)} | variables
    return subprocess.Popen([sys.executable, "-c", CHECK], env=environment, stdout=subprocess.PIPE, text=True)


def test_two_processes_compile_at_once_and_share_torchs_threads(tmp_path: Path):
    outputs = [process.communicate(timeout=120)[0].split() for process in [start(tmp_path), start(tmp_path)]]
    assert outputs[0] == outputs[1] == ["True", str(cpu.supported()), "1"]
    left = list((tmp_path / "native").iterdir())
    assert len(left) == 1 and left[0].suffix == ".so"


@pytest.mark.parametrize("variables", [{"QUIRE_NATIVE": "0"}, {"CXX": "no-such-compiler"}, {"CXX": "false"}])
def test_without_compiled_kernels_the_twin_works(tmp_path: Path, variables: dict[str, str]):
    output = start(tmp_path, **variables).communicate(timeout=120)[0].split()
    assert output == ["False", "False", "1"]
    assert not list(tmp_path.glob("native/*.so"))
