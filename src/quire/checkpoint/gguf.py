"""Reads the header of a GGUF file, or of all parts of a split one, and hands out tensors as views into mapped files.

Called by `hf_config` (sizes), the tokenizer (vocabulary) and the worker's loader (weights). Knows the container only:
not what a key or a tensor means, and not torch. Every count and offset is checked against the file before it is used.
"""

import math
import mmap
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

from quire.checkpoint.gguf_names import PartName, missing_parts
from quire.checkpoint.mapped import MappedFile
from quire.errors import BadModelFileError, ModelNotFoundError, UnsupportedModelError
from quire.utils.files import is_there

MAGIC = b"GGUF"

# type -> (elements per block, bytes per block), for the types we can compute with
BLOCK: dict[str, tuple[int, int]] = {
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q2_K": (256, 84),
    "Q3_K": (256, 110),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
    "IQ4_NL": (32, 18),
    "IQ4_XS": (256, 136),
    "MXFP4": (32, 17),
}

# the number a file holds -> name; those missing from BLOCK are valid but have no code here yet
_TYPE_NAMES: dict[int, str] = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1",
    10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K",
    16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS",
    24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 30: "BF16",
    34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip

# Key-value types of the file: scalars as struct codes, then the three with their own rules.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
_BOOL, _STRING, _ARRAY = 7, 8, 9

# A file may be sparse and hundreds of gigabytes long, so its own length does not bound the work. These limits do, for
# all parts of a model together, at about ten times what real models have.
_MAX_HEADER_BYTES = 1 << 28
_MAX_KEYS = 1 << 16
_MAX_TENSORS = 1 << 17
_MAX_ARRAY_ITEMS = 1 << 22
_MAX_PARTS = 512  # each stays open
_MAX_DIMS = 4
_MAX_ALIGNMENT = 1 << 20
_DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One tensor: `shape` is row-major (the file's own order reversed), `offset` from the start of its file."""

    name: str
    type_name: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    part: int = 0  # of a split file, from 0


class GGUFFile:
    """An open GGUF file, or the parts of a split one, of which `path` may be any; a context manager.

    `metadata` (a split file has it in its first part) and `tensors` stay usable after `close()`.
    """

    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._parts: list[_Part] = []
        try:
            self._parts = self._open()
            self.metadata = self._parts[0].metadata
            self.tensors = self._joined()
        except BaseException:
            self.close()
            raise

    def data(self, tensor: GGUFTensor) -> memoryview:
        """The tensor's bytes in the mapped file: read-only and not copied."""
        return self._parts[tensor.part].file.view(tensor.offset, tensor.nbytes)

    def forget(self, tensor: GGUFTensor) -> None:
        """Once the tensor was read: its pages no longer count as this process's memory."""
        self._parts[tensor.part].file.forget(tensor.offset, tensor.nbytes)

    def forget_vocabulary(self) -> None:
        """Once a tokenizer was made, or where none is needed: it is the largest part of the metadata."""
        for key in [key for key in self.metadata if key.startswith("tokenizer.")]:
            del self.metadata[key]

    def close(self) -> None:
        for part in self._parts:
            part.file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self) -> list["_Part"]:
        """All parts, in order."""
        budget = _Budget()
        given = self._add(self.path, budget)
        num_parts = given.whole("split.count", default=1)
        if num_parts <= 1:
            return [given]
        if num_parts > _MAX_PARTS:
            raise _bad(given.name, f"it says that it is one of {num_parts} parts, the limit is {_MAX_PARTS}")
        own = PartName.of(given.name)
        if own is None:
            raise ModelNotFoundError(
                f"{given.name} is one of {num_parts} parts of a split file and its name does not say which: "
                f"give all parts in one folder names such as model-00001-of-{num_parts:05}.gguf."
            )
        if own.count != num_parts or not 1 <= own.number <= num_parts:
            raise _bad(given.name, f"it says that it is one of {num_parts} parts, which is not what its name says")
        self._check_all_there(own)
        parts = []
        for idx in range(num_parts):
            is_given = idx == own.number - 1
            part = given if is_given else self._add(self.path.with_name(own.sibling(idx + 1)), budget)
            parts.append(part)
            part.check_is(idx, given)
        return parts

    def _add(self, path: Path, budget: "_Budget") -> "_Part":
        """Opens one part; kept at once, so that it is closed whatever its header holds."""
        part = _Part(path)
        self._parts.append(part)
        part.read_header(budget)
        return part

    def _check_all_there(self, own: PartName) -> None:
        names = [own.sibling(number) for number in range(1, own.count + 1)]
        missing = missing_parts([name for name in names if is_there(self.path.with_name(name))])
        if missing:
            others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            are = "are" if others else "is"
            raise ModelNotFoundError(
                f"{self.path.name} is one of {own.count} parts, of which {missing[0]}{others} {are} not there: "
                "put all parts into one folder."
            )

    def _joined(self) -> dict[str, GGUFTensor]:
        """The tensors of all parts; each knows its part."""
        tensors = self._parts[0].tensors
        for idx, part in enumerate(self._parts[1:], 1):
            for name, tensor in part.tensors.items():
                if name in tensors:
                    other = self._parts[tensors[name].part].name
                    raise _bad(part.name, f"it holds the tensor {name!r:.80}, which {other} holds as well")
                tensors[name] = replace(tensor, part=idx)
        claimed = self._parts[0].whole("split.tensors.count", default=len(tensors))
        if len(self._parts) > 1 and len(tensors) != claimed:
            raise _bad(
                self._parts[0].name,
                f"it says that all parts have {claimed} tensors, and they have {len(tensors)}: "
                "one of them is of another model",
            )
        return tensors


class _Part:
    """One file, mapped, with what its own header says."""

    def __init__(self, path: Path) -> None:
        self.name = path.name
        self.file = MappedFile(path)
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GGUFTensor] = {}

    def whole(self, key: str, default: int) -> int:
        """The whole number under a key."""
        value = self.metadata.get(key, default)
        if type(value) is not int or value < 0:
            raise _bad(self.name, f"its {key} is not a whole number")
        return value

    def check_is(self, idx: int, given: "_Part") -> None:
        """BadModelFileError unless this is the part its name says, of the same model as the given one."""
        num_parts = given.whole("split.count", 1)
        if self.whole("split.count", 1) != num_parts:
            raise _bad(self.name, f"it is not one of {num_parts} parts: it belongs to another model than {given.name}")
        number = self.whole("split.no", 0)
        if number != idx:
            raise _bad(self.name, f"it is part {number + 1} under the name of part {idx + 1}")
        for key in ("split.tensors.count", "general.architecture"):
            own, others = self.metadata.get(key), given.metadata.get(key)
            if own is not None and others is not None and own != others:
                raise _bad(self.name, f"it belongs to another model than {given.name} (its {key} differs)")

    def read_header(self, budget: "_Budget") -> None:
        cursor = _Cursor(self.file.raw, self.name, budget)
        if cursor.read_bytes(4) != MAGIC:
            cursor.fail("it does not begin with the letters GGUF")
        version = cursor.integer("I")
        if version not in (2, 3):
            is_big_endian = version & 0xFFFF == 0
            kind = "big-endian GGUF file" if is_big_endian else f"GGUF file of version {version}"
            raise UnsupportedModelError(f"{self.name} is a {kind}: convert it to little-endian GGUF version 3.")
        # The smallest tensor record takes 8 + 4 + 8 + 4 + 8 bytes, the smallest key-value 8 + 1 + 4 + 1.
        num_tensors = cursor.count("Q", "tensors", least_bytes=32, limit=budget.tensors)
        num_keys = cursor.count("Q", "keys", least_bytes=14, limit=budget.keys)
        for _ in range(num_keys):
            key = cursor.string()
            if not key or key in self.metadata:
                cursor.fail(f"the key {key!r:.80} is empty or occurs twice")
            self.metadata[key] = cursor.value()
        records = [cursor.tensor_record() for _ in range(num_tensors)]
        data_start = _round_up(cursor.position, self._alignment(cursor))
        self.tensors = {record.name: self._placed(record, data_start, cursor) for record in records}
        if len(self.tensors) != num_tensors:
            cursor.fail("two tensors have the same name")
        self._check_no_overlap(cursor)
        budget.tensors -= num_tensors
        budget.keys -= num_keys
        budget.header_bytes -= cursor.position

    def _alignment(self, cursor: "_Cursor") -> int:
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        in_range = type(alignment) is int and 0 < alignment <= _MAX_ALIGNMENT
        if not in_range or alignment & (alignment - 1):
            cursor.fail(f"its alignment {alignment!r:.80} is not a power of two up to {_MAX_ALIGNMENT}")
        return alignment

    def _placed(self, record: "_Record", data_start: int, cursor: "_Cursor") -> GGUFTensor:
        """The record with its place in the file, once type, size and place are known to make sense."""
        label = f"tensor {record.name!r:.80}"
        type_name = _TYPE_NAMES.get(record.type_id)
        if type_name is None:
            cursor.fail(f"{label} has the unknown type number {record.type_id}")
        if type_name not in BLOCK:
            raise UnsupportedModelError(
                f"{self.name} holds {type_name} weights: use a file of the types Quire reads, {', '.join(BLOCK)}."
            )
        block_elements, block_bytes = BLOCK[type_name]
        if record.dims[0] % block_elements:
            cursor.fail(f"{label} has rows of {record.dims[0]}, not a multiple of the {block_elements} of {type_name}")
        nbytes = math.prod(record.dims) // block_elements * block_bytes
        offset = data_start + record.offset
        if record.offset % self._alignment(cursor):
            cursor.fail(f"{label} is not aligned")
        if offset + nbytes > len(self.file.raw):
            cursor.fail(f"{label} ends at byte {offset + nbytes}, the file at byte {len(self.file.raw)}")
        return GGUFTensor(record.name, type_name, record.dims[::-1], offset, nbytes)

    def _check_no_overlap(self, cursor: "_Cursor") -> None:
        end = 0
        for tensor in sorted(self.tensors.values(), key=lambda tensor: tensor.offset):
            if tensor.offset < end:
                cursor.fail(f"tensor {tensor.name!r:.80} overlaps another")
            end = tensor.offset + tensor.nbytes


@dataclass(frozen=True, slots=True)
class _Record:
    """A tensor's entry in the header, not checked yet; `dims` in the file's order, fastest first."""

    name: str
    dims: tuple[int, ...]
    type_id: int
    offset: int


@dataclass(slots=True)
class _Budget:
    """What the headers of a model's parts may still hold."""

    header_bytes: int = _MAX_HEADER_BYTES
    keys: int = _MAX_KEYS
    tensors: int = _MAX_TENSORS
    array_items: int = _MAX_ARRAY_ITEMS


class _Cursor:
    """Reads the header front to back and fails before reading past its end."""

    def __init__(self, buffer: mmap.mmap, file_name: str, budget: _Budget) -> None:
        self._buffer = buffer
        self._file_name = file_name
        self._end = min(len(buffer), budget.header_bytes)
        self._budget = budget
        self.position = 0

    def fail(self, why: str) -> NoReturn:
        raise _bad(self._file_name, why)

    def fail_truncated(self) -> NoReturn:
        self.fail("it ends in the middle of its header (truncated?)")

    def read_bytes(self, num_bytes: int) -> bytes:
        start = self.position
        if num_bytes > self._end - start:
            self.fail_truncated()
        self.position += num_bytes
        return self._buffer[start : self.position]

    def scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self.read_bytes(struct.calcsize("<" + code)))[0]

    def integer(self, code: str) -> int:
        return int(self.scalar(code))

    def count(self, code: str, what: str, *, least_bytes: int, limit: int) -> int:
        """A count of things that take at least `least_bytes` each, so that the file bounds every loop and list."""
        count = self.integer(code)
        if count > limit:
            self.fail(f"it claims {count} {what}, the limit is {limit}")
        if count * least_bytes > self._end - self.position:
            self.fail(f"it claims {count} {what}, more than fit into the file (truncated?)")
        return count

    def string(self) -> str:
        return self._strings(1)[0]

    def value(self) -> Any:
        kind = self.integer("I")
        if kind == _ARRAY:
            return self._array()
        if kind == _STRING:
            return self.string()
        if kind == _BOOL:
            return self._bools(1)[0]
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        self.fail(f"a key has the unknown type {kind}")

    def tensor_record(self) -> _Record:
        name = self.string()
        num_dims = self.count("I", "dimensions", least_bytes=8, limit=_MAX_DIMS)
        dims = struct.unpack(f"<{num_dims}Q", self.read_bytes(8 * num_dims))
        if math.prod(dims) == 0 or not dims:
            self.fail(f"tensor {name!r:.80} has no elements")
        return _Record(name, dims, self.integer("I"), self.integer("Q"))

    def _array(self) -> list[Any]:
        kind = self.integer("I")
        if kind == _ARRAY:
            self.fail("it nests arrays in arrays")
        code = _SCALARS.get(kind, "B")
        item_bytes = 8 if kind == _STRING else struct.calcsize("<" + code)
        count = self.count("Q", "array items", least_bytes=item_bytes, limit=self._budget.array_items)
        self._budget.array_items -= count
        if kind == _STRING:
            return self._strings(count)
        if kind == _BOOL:
            return self._bools(count)
        if kind not in _SCALARS:
            self.fail(f"an array has the unknown type {kind}")
        return list(struct.unpack(f"<{count}{code}", self.read_bytes(count * item_bytes)))

    def _strings(self, count: int) -> list[str]:
        """Vocabularies have hundreds of thousands of strings: reading a header spends most of its time in this loop."""
        buffer, end = self._buffer, self._end
        position = self.position
        read_length = struct.Struct("<Q").unpack_from
        strings = []
        try:
            for _ in range(count):
                start = position + 8
                position = start + read_length(buffer, position)[0]
                if position > end:
                    self.fail_truncated()
                strings.append(str(buffer[start:position], "utf-8"))
        except struct.error:
            self.fail_truncated()
        except UnicodeDecodeError:
            self.fail("a string in its header is not UTF-8")
        self.position = position
        return strings

    def _bools(self, count: int) -> list[bool]:
        raw = self.read_bytes(count)
        if raw.strip(b"\0\1"):
            self.fail("a boolean is neither 0 nor 1")
        return [byte == 1 for byte in raw]


def _bad(file_name: str, why: str) -> BadModelFileError:
    return BadModelFileError(f"{file_name} is not usable: {why}; fetch it again or use another GGUF file.")


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
