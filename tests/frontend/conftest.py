"""Real vocabularies: SmolLM2's GGUF, and the vocab-only GGUFs with expected ids in llama-cpp-python's sdist."""

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import pytest

from quire import env
from quire.checkpoint.find import find
from quire.frontend.tokenizer import Tokenizer

SDIST = "llama-cpp-python==0.3.36"
SDIST_SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"


@pytest.fixture(scope="session")
def vocab_dir() -> Path:
    """A folder with ggml-vocab-NAME.gguf and, for most, .gguf.inp (texts) and .gguf.out (ids)."""
    folder = env.cache_dir() / "testdata" / SDIST.replace("==", "-")
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as work:
            _extract(_download(Path(work)), Path(work, "vocabularies"))
            try:
                os.rename(Path(work, "vocabularies"), folder)
            except OSError:  # another run was faster
                assert folder.is_dir()
    return folder


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary=llama-cpp-python", SDIST]
    subprocess.run([*command, "--dest", str(folder)], check=True)
    (sdist,) = folder.glob("*.tar.gz")
    assert hashlib.sha256(sdist.read_bytes()).hexdigest() == SDIST_SHA256
    return sdist


def _extract(sdist: Path, folder: Path) -> None:
    folder.mkdir()
    with tarfile.open(sdist) as archive:
        for member in archive:
            path = Path(member.name)
            if path.parts[1:-1] == ("vendor", "llama.cpp", "models") and path.name.startswith("ggml-vocab-"):
                with archive.extractfile(member) as source, (folder / path.name).open("wb") as target:
                    shutil.copyfileobj(source, target)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    return find("smollm2").path


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path) -> Tokenizer:
    return Tokenizer.from_path(smollm2_path)


@pytest.fixture(scope="session")
def hf_smollm2(smollm2_path: Path):
    """transformers' own reading of the same file, untouched."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(smollm2_path.parent), gguf_file=smollm2_path.name)
