"""Lists the tensors of a folder's safetensors files and hands them out as views into the mapped files.

Called by the worker's loader. Knows the container only: not what a name means, and not torch. Every offset is checked
against the file before it is used, and nothing in a folder is ever executed: pickled weights are refused.
"""

import json
import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from quire.checkpoint.mapped import MappedFile
from quire.errors import BadModelFileError, ModelNotFoundError, UnsupportedModelError
from quire.utils.files import is_there, read_file

_INDEX = "model.safetensors.index.json"
_MAX_INDEX_BYTES = 1 << 26
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_MAX_DIMS = 16

# bits per element
_DTYPE_BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4,
    "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32, "U16": 16, "U8": 8, "BOOL": 8,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class SafeTensor:
    """One tensor as its file holds it; `offset` counts from the file's start."""

    name: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class SafetensorsFolder:
    """A folder's safetensors files as one dict of tensors; a context manager. `tensors` outlives `close()`."""

    tensors: dict[str, SafeTensor]

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._files: dict[Path, MappedFile] = {}
        try:
            self.tensors = self._list()
        except BaseException:
            self.close()
            raise

    def data(self, tensor: SafeTensor) -> memoryview:
        """The tensor's bytes in the mapped file: read-only and not copied."""
        return self._files[tensor.path].view(tensor.offset, tensor.nbytes)

    def forget(self, tensor: SafeTensor) -> None:
        """Once the tensor was read: its pages no longer count as this process's memory."""
        self._files[tensor.path].forget(tensor.offset, tensor.nbytes)

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _list(self) -> dict[str, SafeTensor]:
        if is_there(self.folder / _INDEX):
            return self._list_by_index()
        tensors: dict[str, SafeTensor] = {}
        for path in _files_without_index(self.folder):
            for tensor in self._open(path):
                if tensor.name in tensors:
                    other = tensors[tensor.name].path.name
                    raise _bad(path, f"it holds {tensor.name!r:.80}, which {other} holds as well")
                tensors[tensor.name] = tensor
        return tensors

    def _list_by_index(self) -> dict[str, SafeTensor]:
        index_path = self.folder / _INDEX
        try:
            raw = read_file(index_path, _MAX_INDEX_BYTES)
        except OSError as error:
            raise _bad(index_path, f"it cannot be read ({error.strerror})") from None
        weight_map = _parse(raw, index_path).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise _bad(index_path, "it has no weight_map")
        held: dict[tuple[str, str], SafeTensor] = {}
        for file_name in sorted({str(name) for name in weight_map.values()}):
            # A name, never a path: it must not reach outside the folder.
            is_path = any(character in file_name for character in "/\\\0")
            if is_path or not file_name.endswith(".safetensors"):
                raise _bad(index_path, f"it names {file_name!r:.80}, which is not the plain name of a safetensors file")
            held.update({(file_name, tensor.name): tensor for tensor in self._open(self.folder / file_name)})
        for name, file_name in weight_map.items():
            if (file_name, name) not in held:
                raise _bad(index_path, f"it looks for {name!r:.80} in {file_name!r:.80}, where it is not")
        return {name: held[file_name, name] for name, file_name in weight_map.items()}

    def _open(self, path: Path) -> list[SafeTensor]:
        self._files[path] = file = MappedFile(path)
        return _read_header(path, file.raw)


def _files_without_index(folder: Path) -> list[Path]:
    if is_there(folder / "model.safetensors"):
        return [folder / "model.safetensors"]  # others beside it are the same weights in another layout, or adapters
    if files := sorted(folder.glob("*.safetensors")):
        return files
    if pickled := [path.name for path in folder.glob("*") if path.suffix in (".bin", ".pt", ".pth", ".ckpt")]:
        raise UnsupportedModelError(
            f"{folder.name} holds its weights as {min(pickled)}, a format that can run code when it is opened: "
            "convert them to safetensors (transformers' save_pretrained does it)."
        )
    raise ModelNotFoundError(f"{folder} holds no safetensors file: fetch the model's weights as well.")


def _read_header(path: Path, mapped: mmap.mmap) -> list[SafeTensor]:
    if len(mapped) < 8:
        raise _bad(path, "it is shorter than its header (truncated?)")
    (header_bytes,) = struct.unpack("<Q", mapped[:8])
    if header_bytes > min(_MAX_HEADER_BYTES, len(mapped) - 8):
        raise _bad(path, f"it claims a header of {header_bytes} bytes, more than there are or may be (truncated?)")
    data_start = 8 + header_bytes
    header = _parse(mapped[8:data_start], path)
    header.pop("__metadata__", None)
    tensors = [_read_entry(name, entry, path, data_start) for name, entry in header.items()]
    # The format leaves no gaps and no overlaps: each tensor begins where the one before it ends.
    end = data_start
    for tensor in sorted(tensors, key=lambda tensor: (tensor.offset, tensor.nbytes)):
        if tensor.offset != end:
            raise _bad(path, f"{tensor.name!r:.80} begins at byte {tensor.offset}, the one before it ends at {end}")
        end += tensor.nbytes
    if end != len(mapped):
        raise _bad(path, f"its tensors end at byte {end}, the file at byte {len(mapped)} (truncated?)")
    return tensors


def _read_entry(name: str, entry: Any, path: Path, data_start: int) -> SafeTensor:
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(start), int(end)]}:
            has_shape = len(shape) <= _MAX_DIMS and all(type(size) is int and 0 <= size < 1 << 63 for size in shape)
            is_sound = has_shape and 0 <= start <= end
        case _:
            is_sound = False
    if not is_sound:
        raise _bad(path, f"the entry of {name!r:.80} is malformed")
    if dtype not in _DTYPE_BITS:
        raise UnsupportedModelError(f"{path.name} holds {name!r:.80} as {dtype!r:.80}, a type Quire does not know.")
    if math.prod(shape) * _DTYPE_BITS[dtype] != 8 * (end - start):
        raise _bad(path, f"{name!r:.80} has {end - start} bytes, which is not {dtype} of shape {shape!r:.80}")
    return SafeTensor(name, path, dtype, tuple(shape), data_start + start, end - start)


def _parse(raw: bytes, path: Path) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a name occurs twice")
        return found

    try:
        value = json.loads(raw, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:  # ValueError: also bad UTF-8 and absurdly long numbers
        raise _bad(path, f"its header is not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise _bad(path, "its header is not a JSON object")
    return value


def _bad(path: Path, why: str) -> BadModelFileError:
    return BadModelFileError(f"{path.name} is not usable: {why}; fetch it again.")
