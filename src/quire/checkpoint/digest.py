"""A digest by which machines tell whether they hold the same model: cheap, whatever the size of its weights.

Called by `executor/ray.py` and by the workers it places. Goes over names, sizes and small files whole, and over
headers and sixteen places of large ones: enough for another model, revision or quantization and for a copy that was
cut short, not for somebody who means to deceive.
"""

import hashlib
import os
from pathlib import Path
from typing import BinaryIO

from quire.checkpoint.gguf_names import PartName
from quire.utils.files import open_file

SUFFIXES = {".json", ".safetensors", ".gguf", ".model", ".txt", ".jinja", ".bin", ".pt"}
WHOLE_BYTES = 64 << 20  # of files that are no weights: config, tokenizer, templates
HEADER_BYTES = 16 << 20  # at the start of files with weights
NUM_PLACES = 16
PLACE_BYTES = 64 << 10
WEIGHTS = {".safetensors", ".gguf", ".bin", ".pt"}


def model_digest(model: str) -> str:
    """Of a folder, a file, or all parts of a split one. OSError: it is not there, or cannot be read."""
    digest = hashlib.sha256()
    files = _files(Path(model))
    if not files:
        raise FileNotFoundError(model)
    for path in files:
        with open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            digest.update(f"{path.name}\0{size}\0".encode())
            _add(digest, file, size, HEADER_BYTES if path.suffix in WEIGHTS else WHOLE_BYTES)
    return digest.hexdigest()


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        return sorted(entry for entry in path.iterdir() if entry.suffix in SUFFIXES)
    part = PartName.of(path.name)
    return [path] if part is None else [path.with_name(part.sibling(i)) for i in range(1, part.count + 1)]


def _add(digest: "hashlib._Hash", file: BinaryIO, size: int, num_first: int) -> None:
    digest.update(file.read(num_first))
    if size <= num_first:
        return
    for place in range(NUM_PLACES):
        file.seek((size - PLACE_BYTES) * place // (NUM_PLACES - 1))
        digest.update(file.read(PLACE_BYTES))
