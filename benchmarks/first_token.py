"""Times a command from its start to its first answer, with the model's files in the disk's cache.

    python benchmarks/first_token.py [--runs 5] [-- arguments of quire generate]       to the first character
    python benchmarks/first_token.py --serve [--runs 5] [-- arguments of quire serve]  to a whole chat answer over HTTP

Run it with the environment Quire is installed in. Exit status 1 when the median is over the bar.
"""

import argparse
import contextlib
import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from statistics import median

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from benchmarks.server_process import free_port  # noqa: E402

BARS_S = {"generate": 4.0, "serve": 6.0}
GENERATE = ["--model", "smollm2", "--max-tokens", "16", "The capital of France is"]
SERVE = ["smollm2"]
QUESTION = {
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "max_tokens": 16,
    "temperature": 0,
}
POLL_S = 0.02


def time_generate_s(command: list[str]) -> float:
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0) as process:
        first = process.stdout.read(1)
        elapsed_s = time.perf_counter() - start
        _, said = process.communicate()
    if process.returncode != 0 or not first:
        raise SystemExit(f"{' '.join(command)} failed with status {process.returncode}:\n{said.decode()}")
    return elapsed_s


def time_serve_s(command: list[str]) -> float:
    """Asks from the start, again and again, until there is an answer."""
    port = free_port()
    start = time.perf_counter()
    with subprocess.Popen([*command, "--port", str(port)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        try:
            while process.poll() is None:
                with contextlib.suppress(OSError):
                    if ask(f"http://127.0.0.1:{port}/v1/chat/completions"):
                        return time.perf_counter() - start
                time.sleep(POLL_S)
            said = process.stdout.read().decode()
            raise SystemExit(f"{' '.join(command)} failed with status {process.returncode}:\n{said}")
        finally:
            process.terminate()


def ask(url: str) -> bool:
    request = urllib.request.Request(url, json.dumps(QUESTION).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            answer = json.load(response)
        return bool(answer["choices"][0]["message"]["content"])
    except urllib.error.HTTPError as error:  # 503 while the engine starts
        error.close()
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--serve", action="store_true", help="time quire serve instead of quire generate")
    parser.add_argument("arguments", nargs="*", help="for the command, after --")
    args = parser.parse_args()
    if args.serve:
        name, measure, arguments = "serve", time_serve_s, SERVE
    else:
        name, measure, arguments = "generate", time_generate_s, GENERATE
    script = Path(sys.executable).with_name("quire")  # there where Quire is installed; else it is run from its sources
    quire = [str(script)] if script.exists() else [sys.executable, "-m", "quire"]
    command = [*quire, name, *(args.arguments or arguments)]

    measure(command)  # warms the caches
    times_s = [measure(command) for _ in range(args.runs)]
    print("  ".join(f"{time_s:.2f}" for time_s in times_s))
    print(f"median {median(times_s):.2f} s from quire {name} to its first answer, at most {BARS_S[name]:.0f} s wanted")
    if median(times_s) > BARS_S[name]:
        sys.exit(1)


if __name__ == "__main__":
    main()
