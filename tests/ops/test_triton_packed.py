"""Kernels for packed weights against their twin in plain torch: every kind of code, rows from one to many."""

from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from quire.ops.elementwise import triton as elementwise
from quire.ops.elementwise.reference import silu_mul
from quire.ops.moe import reference as experts_twin
from quire.ops.moe import triton as moe
from quire.ops.packed_linear import cuts, many_rows, rows, tiles, words
from quire.ops.packed_linear import triton as ops
from quire.ops.packed_linear.forms import Affine, Float8, Form, Table4, TwoLevel
from quire.ops.rounding.reference import FLOAT8
from quire.quant.kept.triton import Words

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
DTYPES = (torch.float32, torch.bfloat16) if HAS_GPU else (torch.float32,)
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
MANY_ROWS = (5, 8, 16, 17, 64, 300)
TILES_ROWS = (*MANY_ROWS, 2, 77, 129, 600) if HAS_GPU else (5,)
# One form of each kind, whose rows are counted in the interpreter too.
KINDS = ("4 bits, zero points", "4 bits, two levels", "mxfp4", "float8", "float8 for float8")
FEW_ROWS = (1, 2, 3, 4, 8, 16, 17)  # beside the 5 that all forms have


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=GENERATOR)


GENERATOR = torch.Generator().manual_seed(0)
TABLE = tuple(random(16).tolist())


def codes(n: int, k: int, bits: int) -> Tensor:
    return torch.randint(0, 2**bits, (n, k), dtype=torch.uint8, generator=GENERATOR)


def float8(n: int, k: int, rounds: str | None) -> Float8:
    return Float8((random(n, k) * 10).to(FLOAT8), random(n).abs() * 0.01, rounds=rounds, input_scale=0.01)


def blocks(n: int, k: int) -> Float8:
    scales = random(-(-n // 128), -(-k // 128)).abs() * 0.01
    return replace(float8(n, k, "float8 group"), scales=scales, block=(128, 128))


def small_scales(n: int, groups: int) -> Tensor:
    return (random(n, groups).abs() * 0.01).half()


def two_levels(n: int, groups: int) -> TwoLevel:
    return TwoLevel(codes(n, groups, 6), small_scales(n, groups // 2))


def zero_points(n: int, k: int) -> Affine:
    scales = small_scales(n, k // 64)
    return Affine(codes(n, k, 4), scales, 4, 0, TwoLevel(codes(n, k // 64, 4), -scales))


FORMS = {
    "4 bits, minimums": lambda n, k: Affine(codes(n, k, 4), small_scales(n, k // 32), 4, 0, -random(n, k // 32).abs()),
    "4 bits, pairs with minimums": lambda n, k: Affine(
        codes(n, k, 4), small_scales(n, k // 32).bfloat16(), 4, 0, -small_scales(n, k // 32).bfloat16()
    ),
    "4 bits, large groups": lambda n, k: Affine(codes(n, k, 4), small_scales(n, k // 64), 4, 8),
    "4 bits, ordered": lambda n, k: Affine(
        codes(n, k, 4), small_scales(n, k // 32), 4, 8, order_K=torch.randperm(k, generator=GENERATOR).int()
    ),
    "4 bits, two levels": lambda n, k: Affine(
        codes(n, k, 4), two_levels(n, k // 32), 4, 0, TwoLevel(codes(n, k // 32, 6), -small_scales(n, k // 64))
    ),
    "4 bits, zero points": lambda n, k: zero_points(n, k),
    "6 bits": lambda n, k: Affine(codes(n, k, 6), small_scales(n, k // 16), 6, 32),
    "8 bits": lambda n, k: Affine(codes(n, k, 8), small_scales(n, 1), 8, 128),
    "int8 for int8": lambda n, k: Affine(codes(n, k, 8), small_scales(n, 1), 8, 128, rounds="int8 token"),
    "mxfp4": lambda n, k: Table4(codes(n, k, 4), codes(n, k // 32, 2) + 118),
    "mxfp4, large scales": lambda n, k: Table4(codes(n, k, 4), codes(n, k // 32, 2) + 136),
    "e2m1, float8 scales of 32": lambda n, k: Table4(codes(n, k, 4), random(n, k // 32).abs().to(FLOAT8)),
    "nvfp4": lambda n, k: Table4(codes(n, k, 4), random(n, k // 16).abs().to(FLOAT8), outer_N=random(n).abs()),
    "e2m1, scales in float32": lambda n, k: Table4(codes(n, k, 4), random(n, k // 16).abs()),
    "a table": lambda n, k: Table4(codes(n, k, 4), random(n, k // 64).abs(), TABLE),
    "float8": lambda n, k: float8(n, k, None),
    "float8 for float8": lambda n, k: float8(n, k, "float8 token"),
    "float8, static": lambda n, k: float8(n, k, "float8 static"),
    "float8 in blocks": blocks,
}


def moved(form):
    """The same with all its tensors on the device."""
    values = {field.name: getattr(form, field.name) for field in fields(form)}
    changes = {key: value.to(DEVICE) for key, value in values.items() if isinstance(value, Tensor)}
    changes |= {key: moved(value) for key, value in values.items() if isinstance(value, TwoLevel)}
    return replace(form, **changes)


def packed(name: str, n: int = 20, k: int = 192) -> words.WordWeight:
    form: Form = FORMS[name](n, k)
    form = moved(form)
    found = words.pack(form)
    assert found is not None
    torch.testing.assert_close(found.numbers(), form.numbers(), rtol=1e-6, atol=0)
    return found


@pytest.fixture(autouse=True)
def same_numbers():
    """Whatever tests ran before: a sum that lies between two float8 may be rounded either way."""
    GENERATOR.manual_seed(0)


def inputs(w: words.WordWeight, num_rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, dict]:
    """Activations, the same as the kernels get them, and what else these need."""
    return rounded(random(num_rows, w.k).to(DEVICE, dtype), w)


def rounded(x: Tensor, w: words.WordWeight) -> tuple[Tensor, Tensor, dict]:
    if w.rounds is None:
        return x, x, {}
    codes, scales = rows.round_rows(x, w.rounds, w.input_scale)
    expected, expected_scales = words.round_rows(x, w.rounds, w.input_scale)
    # The device divides by a row's largest number differently in the last bit: a code may be its neighbour.
    torch.testing.assert_close(scales, expected_scales, rtol=1e-6, atol=0)
    num_differing = int((codes.float() != expected.float()).sum())
    assert num_differing <= 4 + x.numel() // 200
    return x, codes, {"scales": scales, "dtype": x.dtype}


def check(found: Tensor, expected: Tensor, times: float = 1) -> None:
    atol = times * TOLERANCE[expected.dtype] * expected.abs().max().item()
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)


@pytest.mark.parametrize("dtype", (*DTYPES, torch.float16))
@pytest.mark.parametrize("name", FORMS)
def test_one_row_equals_the_twin(name, dtype):
    w = packed(name)
    largest = 2**-9 if dtype == torch.float16 else 1.0  # products of gates and ups stay finite
    x = (random(1, w.k) * torch.linspace(-6, 0, w.k).exp() * largest).to(DEVICE, dtype)  # of very different sizes
    x, given, options = rounded(x, w)
    bias = random(w.n).to(DEVICE, dtype)
    expected = words.linear(x, w, bias)
    check(ops.linear(given, w, bias, **options), expected)
    check(ops.linear_silu_mul(given, w, bias, **options), silu_mul(expected))


@pytest.mark.parametrize("name", ["4 bits, zero points", "mxfp4", "nvfp4", "6 bits"])
def test_small_inputs_beside_large_ones_keep_their_part(name):
    """Where inputs become whole numbers, small ones are rounded: by less than the large ones were, as float16."""
    w = packed(name)
    x = random(1, w.k).to(DEVICE, torch.float16)
    x[0, 5::40] *= 1000
    w = replace(w, outer_N=torch.full((w.n,), 1e-3, device=DEVICE))  # results stay finite
    expected = words.linear(x.float(), w)
    unit = (x.float().abs().max() * 2**-15 * w.numbers().abs().sum(1)).max().item()
    assert (ops.linear(x, w).float() - expected).abs().max() <= unit / 4 + 2**-10 * expected.abs().max()


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("name", ["4 bits, zero points", "mxfp4"])
def test_an_input_that_is_not_finite_is_seen(name, value):
    w = packed(name)
    x = random(1, w.k).to(DEVICE, torch.float16)
    x[0, 7] = value
    assert not ops.linear(x, w).isfinite().any()


@pytest.mark.parametrize("name", FORMS)
def test_unpacked_weights_are_the_numbers(name):
    w = packed(name)
    expected = w.numbers()
    if w.order_K is not None:
        expected = expected[:, w.order_K.long()]
    torch.testing.assert_close(many_rows.unpack(w, torch.float32), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("num_rows", MANY_ROWS if HAS_GPU else (5,))
@pytest.mark.parametrize("name", FORMS)
def test_many_rows_equal_the_twin(name, num_rows):
    dtype = torch.bfloat16 if HAS_GPU else torch.float32
    w = packed(name, n=256 if HAS_GPU else 20, k=512 if HAS_GPU else 192)
    x, given, options = inputs(w, num_rows, dtype)
    bias = random(w.n).to(DEVICE, dtype)
    check(many_rows.linear(given, w, bias, **options), words.linear(x, w, bias))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", TILES_ROWS)
@pytest.mark.parametrize("name", FORMS)
def test_tiles_equal_the_twin(name, num_rows, dtype):
    w = packed(name, n=256 if HAS_GPU else 20, k=448 if HAS_GPU else 192)
    x, given, options = inputs(w, num_rows, dtype)
    bias = random(w.n).to(DEVICE, dtype)
    check(tiles.linear(given, w, bias, **options), words.linear(x, w, bias))


@pytest.mark.parametrize(
    ("name", "num_rows"),
    [(name, num_rows) for name in KINDS for num_rows in FEW_ROWS] + [(KINDS[0], 64), (KINDS[0], 300)],
)
def test_tiles_and_unpacked_weights_equal_the_twin_for_any_number_of_rows(name, num_rows):
    w = packed(name, n=32 if HAS_GPU else 20)  # the library wants outputs by sixteens
    x, given, options = inputs(w, num_rows, torch.float32)
    bias = random(w.n).to(DEVICE)
    expected = words.linear(x, w, bias)
    check(tiles.linear(given, w, bias, **options), expected)
    if not (HAS_GPU and w.rounds):  # the library's products of 8-bit floats are of 16 bits
        check(many_rows.linear(given, w, bias, **options), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMS)
def test_large_tiles_equal_the_twin(name, dtype):
    """Their weights may be scaled before they are multiplied."""
    w = packed(name, n=256 if HAS_GPU else 20, k=448 if HAS_GPU else 192)
    x, given, options = inputs(w, 70 if HAS_GPU else 3, dtype)
    tile = tiles.Tile(128, 64, 4, 3) if dtype == torch.bfloat16 else tiles.Tile(128, 32, 4, 2)
    check(tiles.linear(given, w, tile=tile, **options), words.linear(x, w))


@pytest.mark.parametrize("name", ["4 bits, zero points", "mxfp4", "float8 for float8"])
def test_float16_stays_float16(name):
    w = packed(name, n=32)  # the library wants outputs by sixteens
    x, given, options = inputs(w, 3, torch.float16)
    bias = random(w.n).to(DEVICE, torch.float16)
    expected = words.linear(x, w, bias)
    one, of_one, its_options = rounded(x[:1], w)
    check(ops.linear(of_one, w, bias, **its_options), words.linear(one, w, bias))
    check(tiles.linear(given, w, bias, **options), expected)
    check(many_rows.linear(given, w, bias, **options), expected)


@pytest.mark.parametrize("name", ["mxfp4", "e2m1, float8 scales of 32"])
def test_a_weight_may_have_a_single_group(name):
    w = packed(name, n=20, k=32)
    x = random(3, w.k).to(DEVICE)
    check(tiles.linear(x, w), words.linear(x, w))
    check(ops.linear(x[:1], w), words.linear(x[:1], w))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [2, 9, 60] if HAS_GPU else [2, 9])
@pytest.mark.parametrize("name", [name for name in FORMS if name != "4 bits, ordered"])
def test_experts_equal_the_twin(name, num_rows, dtype):
    """Few rows read weights for each of their experts, more are sorted by expert first."""
    check_experts(name, num_rows, dtype)


@pytest.mark.parametrize("num_rows", [1, 4, 17])
@pytest.mark.parametrize("name", ["4 bits, zero points", "float8 for float8"])
def test_experts_equal_the_twin_for_any_number_of_rows(name, num_rows):
    check_experts(name, num_rows, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["4 bits, zero points", "mxfp4", "nvfp4"])
def test_experts_of_many_rows_equal_the_twin(name, dtype):
    """Of kinds whose inputs are not rounded: of so many, some would be rounded the other way."""
    check_experts(name, 500 if HAS_GPU else 40, dtype)


def check_experts(name: str, num_rows: int, dtype: torch.dtype) -> None:
    num_experts, top_k = 4, 2
    D, F = (256, 128) if "blocks" in name else (192, 64)
    gate_up = [packed(name, 2 * F, D) for _ in range(num_experts)]
    down = [packed(name, D, F) for _ in range(num_experts)]
    largest = gate_up[0].numbers().abs().max()
    x = (random(num_rows, D).to(DEVICE) / largest).to(dtype)  # so that few activations are clamped
    ids = torch.stack([torch.randperm(num_experts, generator=GENERATOR)[:top_k] for _ in range(num_rows)])
    weights = random(num_rows, top_k).abs().to(DEVICE)
    options = {
        "activation": "clamped_swiglu",
        "gate_up_bias_E2F": random(num_experts, 2 * F).to(DEVICE, dtype),
        "down_bias_ED": random(num_experts, D).to(DEVICE, dtype),
        "added_TD": random(num_rows, D).to(DEVICE, dtype),
    }
    given = [words.ExpertWords(words.concat(matrices), num_experts) for matrices in (gate_up, down)]
    found = moe.experts(x, weights, ids.int().to(DEVICE), *given, **options)
    expected = experts_twin.experts(x, weights, ids.to(DEVICE), gate_up, down, multiply=words.linear, **options)
    # Of 16 bits, which are rounded to 8 between the products, a few become a neighbour of the twin's: found 1.5 times.
    check(found, expected, times=3 if gate_up[0].rounds == "float8 group" and dtype != torch.float32 else 1)


@pytest.mark.parametrize("name", ["4 bits, zero points", "mxfp4", "nvfp4"])
def test_experts_of_many_rows_are_unpacked(name, monkeypatch):
    monkeypatch.setattr(moe, "UNPACKED_ROWS", 2)
    gate_up, down = (words.ExpertWords(words.concat([packed(name, n, 64) for _ in range(2)]), 2) for n in (128, 64))
    x, weights = random(4, 64).to(DEVICE), random(4, 1).abs().to(DEVICE)
    ids = torch.tensor([[0], [1], [1], [0]]).to(DEVICE)
    found = moe.experts(x, weights, ids.int(), gate_up, down)
    monkeypatch.setattr(moe, "UNPACKED_ROWS", 3)
    check(found, moe.experts(x, weights, ids.int(), gate_up, down))


@pytest.mark.parametrize("rounds", ["float8 token", "float8 group", "float8 static", "int8 token"])
def test_gated_outputs_are_rounded_as_inputs_of_the_next_layer(rounds):
    x = random(3, 2 * 192).to(DEVICE, DTYPES[-1])
    codes, scales = rows.round_rows(x, rounds, 0.01, is_gated=True)
    expected, expected_scales = rows.round_rows(silu_mul(x), rounds, 0.01)
    torch.testing.assert_close(scales, expected_scales, rtol=1e-2 if HAS_GPU else 1e-5, atol=0)
    assert (codes.float() != expected.float()).float().mean() <= (0.1 if HAS_GPU else 0.01)  # neighbours, then
    torch.testing.assert_close(codes.float(), expected.float(), rtol=0.13, atol=1)


@pytest.mark.parametrize("name", ["float8 for float8", "float8 in blocks", "int8 for int8", "4 bits, large groups"])
def test_a_layer_takes_a_gated_layers_outputs(name):
    """Rounded by the kernel that computes them, if the layer's weight wants that."""
    layer = object.__new__(Words)
    layer.pieces = [packed(name, n=32, k=128)]
    x = random(20, 2 * 128).to(DEVICE, DTYPES[-1])
    inputs = layer.silu_mul(silu_mul)(x)
    assert isinstance(inputs, rows.Rounded) == (layer.pieces[0].rounds is not None)
    check(layer.apply(inputs, None), layer.apply(silu_mul(x), None))


@pytest.mark.parametrize("num_rows", [1, 5, 17, 40, 300] if HAS_GPU else [5])
@pytest.mark.parametrize(
    ("name", "n", "k"),
    [(name, 20, 192) for name in ("float8 for float8", "float8 in blocks", "int8 for int8")]
    + [("float8 in blocks", 256, k) for k in (256, 384, 320, 640)],
)
def test_a_layer_may_have_sizes_that_the_library_cannot_multiply(name, n, k, num_rows):
    """It wants outputs by sixteens, and blocks of inputs by fours."""
    layer = object.__new__(Words)
    layer.pieces = [packed(name, n, k)]
    x = random(num_rows, k).to(DEVICE, DTYPES[-1])
    assert cuts.fits(x, layer.pieces[0])
    check(layer.apply(x, None), words.linear(x, layer.pieces[0]))


@pytest.mark.parametrize("num_rows", [1, 20])
@pytest.mark.parametrize("name", ["float8 for float8", "int8 for int8"])
def test_a_gated_layer_rounds_its_inputs_once(name, num_rows, monkeypatch):
    layer = object.__new__(Words)
    layer.pieces = [packed(name, n=32, k=128)]
    x = random(num_rows, 128).to(DEVICE, DTYPES[-1])
    rounded_by_a_norm = rows.Rounded(*rows.round_rows(x, layer.pieces[0].rounds), x.dtype)
    calls, round_rows = [], rows.round_rows
    monkeypatch.setattr(rows, "round_rows", lambda *args: calls.append(args) or round_rows(*args))
    found = layer.apply_silu_mul(x, None, silu_mul)
    assert len(calls) == 1
    assert torch.equal(layer.apply_silu_mul(rounded_by_a_norm, None, silu_mul), found)
    assert len(calls) == 1
    check(found, silu_mul(words.linear(x, layer.pieces[0])))


@pytest.mark.parametrize("residual", [False, True], ids=["first", "residual"])
@pytest.mark.parametrize("rounds", ["float8 token", "float8 group", "float8 static", "int8 token"])
def test_norms_round_as_the_next_layer_does(rounds, residual):
    x, weight = random(3, 192).to(DEVICE, DTYPES[-1]), random(192).to(DEVICE, DTYPES[-1])
    added = random(3, 192).to(DEVICE, DTYPES[-1]) if residual else None
    codes, scales, total = elementwise.rounded_rms_norm(rounds, 0.01, x, weight, 1e-5, added)
    normed, expected_total = elementwise.rms_norm(x, weight, 1e-5, added)
    expected, expected_scales = rows.round_rows(normed, rounds, 0.01)
    assert torch.equal(total, expected_total)
    torch.testing.assert_close(scales, expected_scales, rtol=1e-6, atol=0)
    assert torch.equal(codes.float(), expected.float())


def test_a_rows_rounding_does_not_depend_on_other_rows():
    x = random(4, 192).to(DEVICE)
    for rounds in ("float8 token", "float8 group", "int8 token"):
        together, scales = rows.round_rows(x, rounds)
        alone, scale = rows.round_rows(x[2:3].contiguous(), rounds)
        assert torch.equal(together[2:3].float(), alone.float()) and torch.equal(scales[2:3], scale)


def test_rounding_is_to_the_nearest_float8():
    values = torch.cat((torch.linspace(-256, 256, 1531), torch.linspace(-0.03, 0.03, 1733), torch.tensor([256.0])))
    values = values.to(DEVICE)[None]  # the largest of them keeps its value
    found, scales = rows.round_rows(values, "float8 token")
    assert scales.item() == 1.0
    assert torch.equal(found.float(), values.to(FLOAT8).float())


def test_with_a_scale_of_the_checkpoint_numbers_reach_the_largest_float8_and_no_further():
    values = torch.cat((torch.linspace(-448, 448, 1531), torch.tensor([460.0, 1e4, -1e30]))).to(DEVICE)[None]
    found, scales = rows.round_rows(values * 0.5, "float8 static", 0.5)
    assert scales.item() == 0.5
    assert torch.equal(found.float(), values.clamp(-448, 448).to(FLOAT8).float())


@pytest.mark.parametrize("name", ["4 bits, minimums", "float8 in blocks", "nvfp4"])
def test_parts_are_joined_output_by_output(name):
    parts = [packed(name, n=128, k=128) for _ in range(2)]
    assert words.joinable(*parts)
    expected = torch.cat([part.numbers() for part in parts])
    assert torch.equal(words.concat(parts).numbers(), expected)
    assert not words.joinable(parts[0], packed("mxfp4", n=128, k=128))
