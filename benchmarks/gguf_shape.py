"""A GGUF file's shape, to time engines on machines to which the weights are too much to take.

    python benchmarks/gguf_shape.py shrink model.gguf model.shape    # the header, and some blocks of each type
    python benchmarks/gguf_shape.py grow model.shape model.gguf      # a file of the same types and sizes

Its weights are the same few blocks again and again, which take as long to compute as any others; its text means
nothing.
"""

import json
import sys
import zipfile
from pathlib import Path

from gguf import GGML_QUANT_SIZES, GGUFReader

NUM_BLOCKS = 2000  # of a type that are kept


def shrink(model: Path, shape: Path) -> None:
    tensors = GGUFReader(model).tensors
    table = [(tensor.tensor_type.name, int(tensor.data_offset), int(tensor.n_bytes)) for tensor in tensors]
    largest = {tensor.tensor_type: tensor for tensor in sorted(tensors, key=lambda tensor: tensor.n_bytes)}
    with model.open("rb") as file, zipfile.ZipFile(shape, "w", zipfile.ZIP_DEFLATED) as kept:
        kept.writestr("header", file.read(min(offset for _, offset, _ in table)))
        kept.writestr("table", json.dumps({"size": model.stat().st_size, "tensors": table}))
        for kind, tensor in largest.items():
            file.seek(tensor.data_offset)
            kept.writestr(kind.name, file.read(min(tensor.n_bytes, NUM_BLOCKS * GGML_QUANT_SIZES[kind][1])))


def grow(shape: Path, model: Path) -> None:
    with zipfile.ZipFile(shape) as kept, model.open("wb") as file:
        file.write(kept.read("header"))
        table = json.loads(kept.read("table"))
        for kind, offset, num_bytes in table["tensors"]:
            blocks = kept.read(kind)
            file.seek(offset)
            file.write((blocks * (num_bytes // len(blocks) + 1))[:num_bytes])
        file.truncate(table["size"])


if __name__ == "__main__":
    if len(sys.argv) != 4 or sys.argv[1] not in ("shrink", "grow"):
        sys.exit(__doc__)
    if not Path(sys.argv[2]).is_file():
        sys.exit(f"{sys.argv[2]}: no such file")
    {"shrink": shrink, "grow": grow}[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))
