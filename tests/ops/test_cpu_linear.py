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
from quire.checkpoint.gguf import BLOCK
from quire.errors import ConfigError, UnsupportedModelError
from quire.ops.elementwise import cpu as elementwise
from quire.ops.packed_linear import cpu, forms
from quire.ops.packed_linear import reference as ref

TYPES = sorted(set(BLOCK) - set(ref.PLAIN))
ROWS = (1, 2, 3, 4, 5, 8, 16, 17, 33, 64, 130, 300)
INTEGER_TOLERANCE = 3e-4  # of the sum of absolute products: x in 16 bits per block, weights exact
BF16_TOLERANCE = 2**-8  # weights rounded to bf16


# Where a block of each type has its float16 numbers; MXFP4 has a power of two instead.
SCALES_AT = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q2_K": (80, 82), "Q3_K": (108,)}
SCALES_AT |= {"Q6_K": (208,), "MXFP4": ()}


def random_raw(type_name: str, n: int, k: int, seed: int = 0) -> np.ndarray:
    """Random GGUF bytes with scales of about 0.01."""
    block_weights, block_bytes = BLOCK[type_name]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (n * k // block_weights, block_bytes), dtype=np.uint8)
    for at in SCALES_AT.get(type_name, (0,)):
        values = (rng.standard_normal(len(blocks)) * 0.01).astype(np.float16)
        blocks[:, at : at + 2] = values.view(np.uint8).reshape(-1, 2)
    if type_name == "MXFP4":
        blocks[:, 0] = rng.integers(115, 125, len(blocks))
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
    for ours, theirs in zip(native.tensors, twin.tensors, strict=True):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    in_panels = len(raw) * 48 / 40
    assert twin.nbytes <= 1.05 * in_panels  # no more is read than the file holds


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
    for scales in filter(None, (w.scales, w.mins)):
        scales.values.copy_((scales.values.float() * magnitude).half())
        scales.values[0, 0] = 0
    exact = w.dequantize()
    nearest = ((exact.view(torch.int32) + 0x8000) & ~0xFFFF).view(torch.float32)  # halves away from zero
    each = torch.eye(96).bfloat16().repeat(cpu.FEW_ROWS[w.bits] // 96 + 1, 1)
    assert torch.equal(cpu.linear(each, w, out_dtype=torch.float32)[:96].T, nearest)


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
    w = cpu.pack_gguf(type_name, raw, 144, 768)
    few = max(1, cpu.FEW_ROWS[w.bits])
    x = activations(2 * few + 130, 768)
    together = cpu.linear(x[:few], w)
    assert torch.equal(together, torch.cat([cpu.linear(row[None], w) for row in x[:few]]))
    many = cpu.linear(x, w)
    for rows in (slice(33, 64 + few), slice(60, 124 + few)):  # an odd number of strips and an even one: chunks of K
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
    with pytest.raises(ConfigError, match="different layouts"):
        cpu.concat([b, q])


def test_bad_weights_and_inputs_are_refused():
    raw = torch.zeros(100, dtype=torch.uint8)
    assert cpu.gguf_packable("Q4_K", 3, 256)
    assert not cpu.gguf_packable("Q4_K", 3, 128) and not cpu.gguf_packable("F16", 3, 256)
    for type_name, k in (("Q4_K", 128), ("F16", 256), ("Q4_0", 33)):
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


# ---- forms that are not GGUF's ----


def random_affine(bits: int, group: int, n: int, k: int, zero_points: bool, ordered: bool = False) -> forms.Affine:
    generator = torch.Generator().manual_seed(bits * 1000 + group)
    codes = torch.randint(0, 2**bits, (n, k), dtype=torch.uint8, generator=generator)
    scales = (torch.rand(n, k // group, generator=generator) * 0.01).half()
    mins = None
    if zero_points:
        zeros = torch.randint(0, 2 ** min(bits, 7), scales.shape, dtype=torch.uint8, generator=generator)
        mins = forms.TwoLevel(zeros, -scales)
    order = torch.randperm(k, generator=generator).int() if ordered else None
    return forms.Affine(codes, scales, bits, 0 if zero_points else 2 ** (bits - 1), mins, order)


def check_form(form: forms.Form, rows: int, bits: int) -> ref.PackedWeight:
    weight = form.numbers()
    w = cpu.concat([cpu.pack_form(form)])
    assert w.bits == bits
    torch.testing.assert_close(w.dequantize(), weight, rtol=2**-22, atol=0)  # scales of scales are multiplied first
    x = activations(rows, weight.shape[1])
    few = cpu.supported() and rows <= cpu.FEW_ROWS[w.bits] and w.kind != ref.FLOAT_TABLE
    tolerance = (INTEGER_TOLERANCE if few else BF16_TOLERANCE) + BF16_TOLERANCE
    assert relative_error(cpu.linear(x, w), x, weight) < tolerance
    return w


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("group", [16, 32, 128, 384])
def test_whole_numbers_of_any_bits_and_groups(group: int, rows: int):
    for bits in ref.CODE_BITS:
        for zero_points in (False, True):
            check_form(random_affine(bits, group, 50, 384, zero_points), rows, bits)


def test_codes_are_kept_as_packed_as_published_checkpoints_have_them():
    for group in (32, 64, 128):  # 4 bits, and for each group a float16 scale and a zero point of 4 bits
        w = check_form(random_affine(4, group, 64, 512, zero_points=True), 1, 4)
        assert w.nbytes <= 1.05 * 64 * 512 * (4 + (16 + 4) / group) / 8
    w = check_form(random_affine(8, 512, 64, 512, zero_points=False), 1, 8)
    assert w.nbytes <= 1.05 * 64 * 512


@pytest.mark.parametrize("rows", [1, 40])
def test_columns_in_the_order_of_their_groups(rows: int):
    check_form(random_affine(4, 64, 48, 256, zero_points=True, ordered=True), rows, 4)


NF4 = tuple(float(value) for value in np.sort(np.random.default_rng(0).standard_normal(16)))
TABLES = {"e2m1": forms.E2M1, "floats": NF4}


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("scales", ["exponents", "float16", "float32", "outer"])
@pytest.mark.parametrize("table", TABLES)
def test_tables_stay_in_four_bits(table: str, scales: str, rows: int):
    generator = torch.Generator().manual_seed(7)
    codes = torch.randint(0, 16, (40, 192), dtype=torch.uint8, generator=generator)
    group = 16 if scales == "float16" else 32
    values = torch.rand(40, 192 // group, generator=generator) * 0.01
    outer = None
    if scales == "exponents":
        values = torch.randint(100, 130, values.shape, dtype=torch.uint8, generator=generator)
        values[0, 0], values[1, 1] = 0, 1  # the smallest powers of two are not normal numbers
    elif scales == "float16":
        values = values.half()
    elif scales == "outer":
        outer = torch.rand(40, generator=generator)
    check_form(forms.Table4(codes, values, TABLES[table], outer), rows, 4)


def test_forms_without_a_kernel_become_bfloat16():
    codes = torch.randn(32, 64).to(torch.float8_e4m3fn)
    w = cpu.pack_form(forms.Float8(codes, torch.full((32,), 0.5)))
    assert w.bits == 16 and torch.equal(w.dequantize(), codes.float() * 0.5)
    odd = forms.Affine(torch.ones(32, 64, dtype=torch.uint8), torch.ones(32, 8), 4)  # groups of 8
    assert cpu.pack_form(odd).bits == 16


@pytest.mark.parametrize("kind", ["Q4_1", "Q6_K", "Q8_0", "IQ4_NL", "table", "dense"])
def test_rows_of_a_packed_table(kind: str):
    n, k = 50, 512
    if kind == "dense":
        w = cpu.pack_dense(torch.randn(n, k))
    elif kind == "table":
        w = cpu.pack_form(forms.Table4(torch.randint(0, 16, (n, k), dtype=torch.uint8), torch.rand(n, k // 64), NF4))
    else:
        w = cpu.pack_gguf(kind, torch.from_numpy(random_raw(kind, n, k)).flatten(), n, k)
    ids = torch.tensor([0, 49, 17, 17, 31], dtype=torch.int32)
    truth = w.dequantize()[ids.long()]
    found = cpu.rows(ids, w)
    assert found.dtype == torch.bfloat16 and found.shape == (5, k)
    assert ((found.float() - truth).abs() <= truth.abs() * 2**-7.8).all()
    assert torch.equal(ref.rows(ids, w), truth.bfloat16())


# ---- building, in other processes ----

CHECK = """
import sys, torch
from quire.ops.packed_linear import cpu as linear
from quire.ops.cpu import build
w = linear.pack_dense(torch.eye(32))
assert torch.equal(linear.linear(torch.eye(32).bfloat16(), w), torch.eye(32).bfloat16())
runtimes = {line.split()[-1] for line in open("/proc/self/maps") if "libgomp" in line}
print(build.load("linear", "QUIRE_KIND=16") is not None, linear.supported(), len(runtimes))
"""


def start(tmp_path: Path, **variables: str) -> subprocess.Popen:
    source = str(Path(quire.__path__[0]).parent)
    environment = os.environ | {"PYTHONPATH": source, "QUIRE_CACHE": str(tmp_path)} | variables
    return subprocess.Popen([sys.executable, "-c", CHECK], env=environment, stdout=subprocess.PIPE, text=True)


def test_two_processes_compile_at_once_and_share_torchs_threads(tmp_path: Path):
    outputs = [process.communicate(timeout=120)[0].split() for process in [start(tmp_path), start(tmp_path)]]
    assert outputs[0] == outputs[1] == ["True", str(cpu.supported()), "1"]
    left = sorted(path.name.split("-")[0] + path.suffix for path in (tmp_path / "native").iterdir())
    assert left == ["linear.so", "pack.so"]


@pytest.mark.parametrize("variables", [{"QUIRE_NATIVE": "0"}, {"CXX": "no-such-compiler"}, {"CXX": "false"}])
def test_without_compiled_kernels_the_twin_works(tmp_path: Path, variables: dict[str, str]):
    output = start(tmp_path, **variables).communicate(timeout=120)[0].split()
    assert output == ["False", "False", "1"]
    assert not list(tmp_path.glob("native/*.so"))
