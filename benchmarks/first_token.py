"""From `quire generate` typed to the first character of its answer, with the model and the disk's cache warm.

    python benchmarks/first_token.py [--runs 5] [-- arguments of quire generate]

Run it with the environment Quire is installed in. Exit status 1 when the median is over the bar.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

BAR_S = 4.0
DEFAULT_ARGUMENTS = ["--model", "smollm2", "--max-tokens", "16", "The capital of France is"]


def time_to_first_token_s(command: list[str]) -> float:
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0) as process:
        first = process.stdout.read(1)
        elapsed_s = time.perf_counter() - start
        _, said = process.communicate()
    if process.returncode != 0 or not first:
        raise SystemExit(f"{' '.join(command)} failed with status {process.returncode}:\n{said.decode()}")
    return elapsed_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("arguments", nargs="*", help="for quire generate, after --")
    args = parser.parse_args()
    script = Path(sys.executable).with_name("quire")  # what a person types; -m where Quire is run from its sources
    quire = [str(script)] if script.exists() else [sys.executable, "-m", "quire"]
    command = [*quire, "generate", *(args.arguments or DEFAULT_ARGUMENTS)]

    time_to_first_token_s(command)  # warms the caches
    times_s = [time_to_first_token_s(command) for _ in range(args.runs)]
    print("  ".join(f"{time_s:.2f}" for time_s in times_s))
    print(f"median {median(times_s):.2f} s to the first token, at most {BAR_S:.0f} s wanted")
    if median(times_s) > BAR_S:
        sys.exit(1)


if __name__ == "__main__":
    main()
