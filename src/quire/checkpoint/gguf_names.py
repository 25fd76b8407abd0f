"""What the names of GGUF files tell: which part of a split file one is, and how its weights are quantized.

Called by the GGUF reader, and by those who choose among files of a folder or a hub. Knows names only and opens nothing.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePosixPath

# As llama.cpp writes parts, counted from 1.
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.ASCII | re.DOTALL)
# The quantization in a name such as model-Q4_K_M.gguf, model.q8_0.gguf or model-UD-Q4_K_XL.gguf.
_QUANTIZATION = re.compile(
    r"(?<![A-Za-z0-9])((?:UD-)?(?:I?Q\d(?:_[A-Z0-9]{1,3})*|TQ\d_\d|BF16|F16|F32|MXFP4(?:_MOE)?|NVFP4))(?![A-Za-z0-9])",
    re.IGNORECASE,
)
_NOT_READ = re.compile(r"IQ[123]|TQ\d|NVFP4|Q1_0")
# Beside a model there may be its vision part, and what its quantization was made with.
_NO_MODELS = re.compile(r"mmproj|imatrix", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class PartName:
    """The name of one part of a split file."""

    stem: str
    number: int  # from 1
    count: int

    @classmethod
    def of(cls, name: str) -> "PartName | None":
        found = _PART.fullmatch(name)
        return cls(found[1], int(found[2]), int(found[3])) if found else None

    def sibling(self, number: int) -> str:
        return f"{self.stem}-{number:05}-of-{self.count:05}.gguf"


def models(names: Iterable[str]) -> dict[str, list[str]]:
    """What to call each model -> its files, parts in order. Models of the same quantization go by their names."""
    files: dict[str, list[str]] = {}
    for name in sorted(names):
        if name.endswith(".gguf") and not _NO_MODELS.search(PurePosixPath(name).name):
            part = PartName.of(name)
            files.setdefault(part.stem if part else name.removesuffix(".gguf"), []).append(name)
    labels = {whole: quantization(whole) for whole in files}
    once = {label for label in labels.values() if list(labels.values()).count(label) == 1}
    found = {labels[whole]: parts for whole, parts in files.items() if labels[whole] in once}
    return found | {PurePosixPath(whole).name: parts for whole, parts in files.items() if labels[whole] not in once}


def quantization(name: str) -> str:
    """Q4_K_M of model-Q4_K_M or q4_k_m/model; the whole name where it tells none."""
    found = _QUANTIZATION.findall(PurePosixPath(name).name) or _QUANTIZATION.findall(name)
    return found[-1].upper() if found else PurePosixPath(name).name


def is_readable(label: str) -> bool:
    """False for quantizations that the reader would refuse, so that nobody fetches them in vain."""
    return not _NOT_READ.match(label.upper().removeprefix("UD-"))


def choose(choices: dict[str, list[str]], wanted: str) -> list[str] | None:
    """The files of the model that goes by this name, in capitals or not; None where none does, or several."""
    found = [files for label, files in choices.items() if label.lower() == wanted.lower()]
    if not found:  # UD-Q4_K_XL for Q4_K_XL
        found = [files for label, files in choices.items() if label.lower().endswith(f"-{wanted.lower()}")]
    return found[0] if len(found) == 1 else None


def missing_parts(files: list[str]) -> list[str]:
    """Names of the parts that a split file should have and that are not among its files."""
    part = PartName.of(files[0])
    if part is None:
        return []
    return [name for number in range(1, part.count + 1) if (name := part.sibling(number)) not in files]
