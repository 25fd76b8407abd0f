"""`python -m tests.models.report [FILE …]`: compares model files and the fallback with transformers; writes
docs/models.md and models/_parity.py.

It measures as the tests do. Takes minutes; run it for a model file that was added or changed: results of others are
kept.
"""

import sys
import tempfile
from pathlib import Path

import transformers

from quire.models._parity import LARGEST_ERROR
from quire.worker.describe import kv_kinds, library
from tests.models.oracle import TOLERANCE, all_cases, largest_error, oracle
from tests.models.test_fallback import CASES as FALLBACK_CASES

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "models.md"
PARITY = ROOT / "src" / "quire" / "models" / "_parity.py"
START, END = "<!-- written by tests/models/report.py: from here -->", "<!-- to here -->"
HEADER = (
    "| architecture | file | lines | KV cache | GGUF | largest logprob error |\n| --- | --- | --- | --- | --- | --- |"
)


def main(files: list[str]) -> int:
    transformers.utils.logging.disable_progress_bar()
    cases = {**all_cases(), **FALLBACK_CASES}
    chosen = {case: fields for case, fields in cases.items() if not files or case.split(":")[0] in files}
    measured = {fields["architectures"][0] for fields in chosen.values()}
    kept = {fields["architectures"][0] for fields in cases.values()} - measured
    errors = {name: error for name, error in LARGEST_ERROR.items() if name in kept}
    failed = []
    for case, fields in chosen.items():
        try:
            error = measure(fields)
        except Exception as exception:  # go on with the other cases
            error = float("inf")
            print(f"{case}: {type(exception).__name__} {exception!s:.200}")
        print(f"{error:8.1e}  {case}", flush=True)
        architecture = fields["architectures"][0]
        errors[architecture] = max(error, errors.get(architecture, 0.0))
        failed += [case] if error >= TOLERANCE else []
    write_parity({name: error for name, error in errors.items() if error < TOLERANCE})
    write_page(errors)
    print(f"{len(failed)} cases fail: {', '.join(failed)}" if failed else "all agree")
    return 1 if failed else 0


def measure(fields: dict) -> float:
    with tempfile.TemporaryDirectory() as folder:
        return largest_error(oracle(fields, Path(folder)), Path(folder))


def write_parity(errors: dict[str, float]) -> None:
    docstring = PARITY.read_text().split("\n", 1)[0]
    lines = "".join(f'    "{name}": {error:.0e},\n' for name, error in sorted(errors.items()))
    PARITY.write_text(f"{docstring}\n\nLARGEST_ERROR: dict[str, float] = {{\n{lines}}}\n")


def write_page(errors: dict[str, float]) -> None:
    rows = []
    for model in sorted(library(), key=lambda m: m["architecture"].lower()):
        num_lines = len((ROOT / "src" / "quire" / model["file"]).read_text().splitlines())
        file, gguf = f"`{model['file']}`", "yes" if model["gguf"] else "no"
        error = describe_error(errors, model["architecture"])
        rows.append((model["architecture"], file, num_lines, " + ".join(model["kv"]), gguf, error))
    for architecture, fields in sorted(FALLBACK_CASES.items()):
        error = describe_error(errors, architecture)
        rows.append((architecture, "the fallback", "", " + ".join(kv_kinds(fields)), "no", error))
    table = "\n".join([HEADER, *(f"| {' | '.join(map(str, row))} |" for row in rows)])
    before, _, rest = PAGE.read_text().partition(START)
    PAGE.write_text(f"{before}{START}\n\n{table}\n\n{END}{rest.partition(END)[2]}")


def describe_error(errors: dict[str, float], architecture: str) -> str:
    error = errors.get(architecture)
    if error is None:
        return "not measured"
    return f"{error:.0e}" if error < TOLERANCE else "differs"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
