"""Linear layers with packed weights (2 to 16 bits) on compiled kernels; twin: `ops/packed_linear/reference.py`.

Called by quantization methods, hundreds of times per token, so a call must cost only microseconds. Knows nothing about
models, files or layers. Where `supported()` is False everything here still works, with the twin.
"""

import ctypes
import functools
import math
import mmap
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from quire.errors import ConfigError
from quire.ops.cpu import build
from quire.ops.cpu.tape import Rows, bind
from quire.ops.packed_linear import reference as packed
from quire.ops.packed_linear.forms import Affine, Blocks, Form, Table4
from quire.ops.packed_linear.reference import PackedWeight, Scales, gateable, gguf_packable, joinable, packable, split

__all__ = [
    "PackedWeight",
    "concat",
    "gateable",
    "gguf_packable",
    "joinable",
    "linear",
    "linear_silu_mul",
    "pack_dense",
    "pack_form",
    "pack_gguf",
    "rows",
    "split",
    "supported",
    "why_not",
]

# By bits: up to how many rows integer products are faster than unpacking to bf16 tiles (benchmarks/cpu_linear.py).
FEW_ROWS = {2: 4, 3: 4, 4: 4, 5: 4, 6: 4, 8: 5, 16: 0}
if (
    not build.has_amx()
):  # then tiles are multiplied with vectors, which takes longer: 1.2 times at 128 rows, 2.3 times at 8
    FEW_ROWS |= dict.fromkeys((2, 3, 4, 5, 6, 8), 128)
SCALE_KINDS = {torch.float16: 0, torch.float32: 1, torch.int8: 2, torch.uint8: 3}  # `ScaleKind` in src/packed.h
NIBBLES, ZEROS = 4, 5


class _Scales(ctypes.Structure):
    """Mirrors `Scales` in src/packed.h."""

    _fields_ = [
        ("values", ctypes.c_void_p),
        ("outer", ctypes.c_void_p),
        ("kind", ctypes.c_int32),
        ("num_outer", ctypes.c_int32),
    ]


class _Weight(ctypes.Structure):
    """Mirrors `Weight` in src/packed.h."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("scales", _Scales),
        ("mins", _Scales),
        ("table", ctypes.c_void_p),
        ("n", ctypes.c_int32),
        ("k", ctypes.c_int32),
        ("bits", ctypes.c_int32),
        ("group", ctypes.c_int32),
        ("num_groups", ctypes.c_int32),
        ("zero", ctypes.c_int32),
        ("float_table", ctypes.c_int32),
        ("few_rows", ctypes.c_int32),
        ("shift", ctypes.c_int32),
    ]


@functools.cache
def _packer() -> Any:
    """The library that packs weights; None where the twin must run."""
    library = build.load("pack")
    if library is None or not library.quire_linear_supported():
        return None
    pointer = ctypes.c_void_p
    library.quire_pack_gguf.argtypes = (pointer, ctypes.c_char_p, pointer)
    library.quire_pack_dense.argtypes = (pointer, pointer)
    return library


@functools.cache
def _kernels(kind: int) -> SimpleNamespace | None:
    """The products with weights whose codes are of one kind (`PackedWeight.kind`)."""
    library = build.load("linear", f"QUIRE_KIND={kind}") if _packer() else None
    if library is None:
        return None
    pointer, integer = ctypes.c_void_p, ctypes.c_int
    return SimpleNamespace(
        linear=bind(library, "quire_linear", (pointer, pointer, Rows, pointer, integer, integer, pointer)),
        linear_silu_mul=bind(library, "quire_linear_silu_mul", (pointer, pointer, Rows, pointer)),
        rows=bind(library, "quire_packed_rows", (pointer, pointer, Rows, pointer, ctypes.c_int64)),
    )


def supported() -> bool:
    """Whether the compiled kernels run here: it takes AVX-512 with VNNI, and a compiler.

    Instructions for bfloat16 and AMX are used if present.
    """
    return _packer() is not None


def why_not(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the compiled kernels cannot be used, if so."""
    if dtype != torch.bfloat16:
        return "it computes in bfloat16"
    return None if supported() else "this CPU, or its compiler, has none of what the compiled kernels need"


def _scales_view(scales: Scales | None) -> _Scales:
    if scales is None:
        return _Scales()
    kind = SCALE_KINDS[scales.values.dtype]
    if scales.are_nibbles:
        kind = NIBBLES
    elif scales.are_zeros:
        kind = ZEROS
    view = _Scales(scales.values.data_ptr(), 0, kind, 0)
    if scales.outer is not None:
        view.outer, view.num_outer = scales.outer.data_ptr(), scales.outer.shape[1]
    return view


def _view(w: PackedWeight) -> _Weight:
    has_floats = w.table is not None and w.table.dtype == torch.float32
    return _Weight(
        w.data.data_ptr(),
        _scales_view(w.scales),
        _scales_view(w.mins),
        0 if w.table is None else w.table.data_ptr(),
        w.n,
        w.k,
        w.bits,
        w.group,
        w.k // w.group,
        w.zero,
        has_floats,
        FEW_ROWS[w.bits],
    )


def _shift(w: PackedWeight) -> int:
    """The power of two that keeps the largest weight just below float16's limit, for src/unpack.h."""
    if w.scales is None:
        return 0
    codes = [0, 2**w.bits - 1] if w.table is None else w.table.tolist()
    largest = w.scales.bound() * max(abs(code - w.zero) for code in codes)
    if w.mins is not None:
        largest += w.mins.bound() * (w.scales.bound() if w.mins.are_zeros else 1)
    _, exponent = math.frexp(largest)
    return max(-14, min(15 - exponent, 15))


def _native(w: PackedWeight) -> int:
    """The address of the C++ view of a filled weight.

    The view is kept with the weight, as are the tensors it points to.
    """
    address = w.__dict__.get("_address")
    if address is None:
        view = _view(w)
        view.shift = _shift(w)
        address = ctypes.addressof(view)
        w.__dict__.update(_kept_view=view, _address=address)
    return address


def pack_gguf(type_name: str, raw: Tensor, n: int, k: int) -> PackedWeight:
    """Packs the raw bytes of a GGUF tensor of type `type_name`, which may be a read-only memory map."""
    packer = _packer()
    if packer is None:
        return packed.pack_gguf(type_name, raw, n, k)
    w = packed.empty_gguf(type_name, raw, n, k, huge_pages.if_large)
    if packer.quire_pack_gguf(ctypes.byref(_view(w)), type_name.encode(), raw.data_ptr()) != 0:
        raise ConfigError(f"the compiled kernels do not know the GGUF type {type_name}")
    return w


def pack_form(form: Form) -> PackedWeight:
    """Whole numbers and tables stay packed; what has no kernel here becomes bf16."""
    if isinstance(form, Blocks):
        if gguf_packable(form.type_name, *form.shape):
            return pack_gguf(form.type_name, form.raw, *form.shape)
    elif isinstance(form, Affine | Table4) and packable(form):
        return packed.pack_form(form, huge_pages.if_large)
    return pack_dense(form.numbers())


def pack_dense(weight: Tensor) -> PackedWeight:
    """Keeps a float weight [n, k] as bf16."""
    packer = _packer()
    if packer is None:
        return packed.pack_dense(weight)
    w = packed.empty_dense(weight, huge_pages.if_large)
    source = weight.to(torch.bfloat16).contiguous()
    packer.quire_pack_dense(ctypes.byref(_view(w)), source.data_ptr())
    return w


class _HugePages:
    """Memory for weights in huge pages, 32 MiB at a time: with fewer address translations, reading is 10 to 20% faster.

    A chunk is freed with the last weight in it. A large weight has a chunk of its own, and is packed where it stays:
    copied there, it would take its memory twice.
    """

    CHUNK_BYTES, PAGE_BYTES = 32 << 20, 2 << 20

    def __init__(self) -> None:
        self._rest = torch.empty(0, dtype=torch.uint8)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes >= self.CHUNK_BYTES:
            return self._chunk(num_bytes).view(dtype).view(shape)
        if num_bytes > len(self._rest):
            self._rest = self._chunk(self.CHUNK_BYTES)
        taken = self._rest[:num_bytes]
        self._rest = self._rest[-(-num_bytes // 64) * 64 :]
        return taken.view(dtype).view(shape)

    def if_large(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        is_large = math.prod(shape) * dtype.itemsize >= self.CHUNK_BYTES
        return self.empty(shape, dtype) if is_large else torch.empty(shape, dtype=dtype)

    def stays(self, tensor: Tensor) -> bool:
        """Whether a tensor is not worth a copy of its own: large codes are in huge pages already."""
        return tensor.nbytes >= self.CHUNK_BYTES

    def forget(self) -> None:
        """Drops the unused rest of the last chunk; weights keep theirs."""
        self._rest = torch.empty(0, dtype=torch.uint8)

    def _chunk(self, num_bytes: int) -> Tensor:
        chunk = torch.empty(num_bytes + self.PAGE_BYTES, dtype=torch.uint8)
        chunk = chunk[-chunk.data_ptr() % self.PAGE_BYTES :][:num_bytes]
        advise = getattr(mmap, "MADV_HUGEPAGE", None)
        if advise is not None:  # where the system ignores the advice, pages are small
            libc = ctypes.CDLL(None)
            libc.madvise(ctypes.c_void_p(chunk.data_ptr()), ctypes.c_size_t(num_bytes), advise)
        return chunk


huge_pages = _HugePages()


def concat(weights: list[PackedWeight]) -> PackedWeight:
    """One weight with the outputs of all, in order, in huge pages; also worthwhile for a single weight.

    All must have the same form and, except for the last, outputs in multiples of 16.
    """
    joined = packed.concat(weights, huge_pages.empty, huge_pages.stays)
    if supported():
        _native(joined)  # now, as it computes with torch, which must not happen while a tape is recorded
        _kernels(joined.kind)  # compiles them, if they never were
    return joined


def _check(x: Tensor, w: PackedWeight) -> None:
    if x.shape[1] != w.k or x.dtype is not torch.bfloat16 or not x.is_contiguous():
        raise ConfigError(
            f"a packed linear layer needs contiguous bfloat16 [rows, {w.k}], got {x.dtype} {tuple(x.shape)}"
        )


def linear(x: Tensor, w: PackedWeight, bias: Tensor | None = None, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """x [T, k] in bf16 times the weight, plus a float32 bias: [T, n] in bf16 or float32."""
    out = x.new_empty((len(x), w.n), dtype=out_dtype) if out_dtype is not x.dtype else x.new_empty((len(x), w.n))
    linear_into(out, x, w, bias)
    return out


def linear_into(out: Tensor, x: Tensor, w: PackedWeight, bias: Tensor | None = None) -> None:
    """The same into `out`, whose rows may lie apart."""
    _check(x, w)
    kernels = _kernels(w.kind)
    if kernels is None:
        out.copy_(packed.linear(x, w, bias, out.dtype))
        return
    if w.order is not None:
        x = x.index_select(1, w.order)
    is_wide = out.dtype is torch.float32
    if not is_wide and out.dtype is not torch.bfloat16:
        raise ConfigError(f"a packed linear layer gives bfloat16 or float32, not {out.dtype}")
    if not len(x):
        return
    bias_ptr = None
    if bias is not None:
        if bias.dtype != torch.float32:  # to a tape, `float()` is computing even where it changes nothing
            bias = bias.float()
        bias_ptr = bias.data_ptr()
    kernels.linear(_native(w), x.data_ptr(), len(x), out.data_ptr(), out.stride(0), is_wide, bias_ptr)


def linear_silu_mul(x: Tensor, w: PackedWeight) -> Tensor:
    """silu(gate) * up in bf16 [T, n / 2], where gate and up are exactly the halves of `linear(x, w)`, in one call."""
    _check(x, w)
    kernels = _kernels(w.kind)
    if kernels is None:
        return packed.linear_silu_mul(x, w)
    if w.order is not None:
        x = x.index_select(1, w.order)
    if not gateable(w):
        raise ConfigError(f"the halves of {w.n} outputs are not multiples of 16: multiply and gate in two calls")
    num_rows = len(x)
    out = x.new_empty((num_rows, w.n // 2))
    if num_rows:
        kernels.linear_silu_mul(_native(w), x.data_ptr(), num_rows, out.data_ptr())
    return out


def rows(ids: Tensor, w: PackedWeight, first: int | None = None) -> Tensor:
    """The rows of the weight with these ids (int32 [T]), in bf16 [T, k]. `first`: as `embedding` of
    ops/elementwise/reference.py."""
    kernels = _kernels(w.kind)
    if kernels is None or w.order is not None:
        return packed.rows(ids, w, first)
    out = w.data.new_empty((len(ids), w.k), dtype=torch.bfloat16)
    if len(ids):
        kernels.rows(_native(w), ids.data_ptr(), len(ids), out.data_ptr(), first or 0)
    return out
