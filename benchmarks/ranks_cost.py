"""What a worker in a process of its own costs: one behind the ring against one in the engine's process, in turn.

    python benchmarks/ranks_cost.py                                     # stream-128 of the default model on CPUs
    python benchmarks/ranks_cost.py --model Qwen/Qwen3-0.6B --device cuda --workload mixed256 --bar 0.99

Exit status 1 when the bar is missed. More arguments are given to `quire bench`.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import median

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from benchmarks.cpu import busy_share  # noqa: E402
from quire.bench.workloads import LATENCY_WORKLOADS  # noqa: E402

SIDES = ("inproc", "mp")
BUSY_SHARE_LIMIT = 0.05  # of all cores, by others, just before a run


def run_once(side: str, args: argparse.Namespace, more: list[str]) -> dict[str, float]:
    kind = "latency" if args.workload in LATENCY_WORKLOADS else "throughput"
    command = [
        sys.executable,
        "-m",
        "quire",
        "bench",
        kind,
        "--workload",
        args.workload,
        "--model",
        args.model,
        "--json",
    ]
    command += ["--distributed-executor-backend", side, *more]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed with status {done.returncode}:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--workload", default="stream-128")
    parser.add_argument("--runs", type=int, default=15, help="of each side (default: %(default)s)")
    parser.add_argument("--bar", type=float, default=0.96, help="least speed behind the ring (default: %(default)s)")
    args, more = parser.parse_known_args()
    key = "decode_tok_s" if args.workload in LATENCY_WORKLOADS else "out_tok_s"
    speeds: dict[str, list[float]] = {side: [] for side in SIDES}
    num_busy = 0
    for nth in range(args.runs):
        for side in SIDES if nth % 2 else reversed(SIDES):
            num_busy += busy_share() > BUSY_SHARE_LIMIT
            speeds[side].append(run_once(side, args, more)[key])
        print(f"run {nth + 1}: " + ", ".join(f"{side} {speeds[side][-1]:,.1f}" for side in SIDES), file=sys.stderr)
    alone, behind = (median(speeds[side]) for side in SIDES)
    pairs = median(there / here for here, there in zip(speeds["inproc"], speeds["mp"]))
    print(f"{args.workload} of {args.model}, {key}: inproc {alone:,.1f}, mp {behind:,.1f}: {behind / alone:.3f}x")
    print(f"a token takes {1e3 / behind - 1e3 / alone:+.3f} ms; median of the ratios of neighbours {pairs:.3f}x")
    if num_busy:
        print(f"warning: {num_busy} runs began while something else used the machine: only an idle one's figures count")
    return int(pairs < args.bar)


if __name__ == "__main__":
    sys.exit(main())
