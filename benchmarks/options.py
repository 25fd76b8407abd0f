"""What an option costs: the same workload with different options, in a process each, their runs alternating.

    python benchmarks/options.py --workloads mixed64,stream-1024 --pairs 9 \\
        --side kv_cache_dtype=auto --side kv_cache_dtype=int8 --side kv_cache_dtype=fp8

A side is options of `LLM` as NAME=VALUE, separated by commas, `model` too; the first side is the one others are
compared with. `--common` are options of all sides. On a GPU the sides share it:

    python benchmarks/options.py --device cuda --model benchmarks/shapes/qwen3-0.6b --workloads mixed256 --pairs 5 \\
        --common load_format=dummy,skip_tokenizer_init=true \\
        --side distributed_executor_backend=inproc --side distributed_executor_backend=mp

Prints the median of each figure, and of its ratio to the first side's in the same round. Engines in one process would
not do: the first one is some percent faster than the others, whatever its options. Whoever runs first in a round is,
too, so the sides take turns at that.
"""

import argparse
import json
from collections import defaultdict
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from statistics import median
from typing import Any

from quire import LLM
from quire.api.commands.bench import generator
from quire.bench import workloads

KV_BYTES = {"cpu": 1 << 30, "cuda": 40 << 30}  # of each side


def options_of(side: str) -> dict[str, Any]:
    """Values are read as JSON where they are JSON: numbers, true, false."""
    options = {}
    for pair in filter(None, side.split(",")):
        name, _, value = pair.partition("=")
        try:
            options[name] = json.loads(value)
        except ValueError:
            options[name] = value
    return options


def run_side(given: dict[str, Any], name: str, device: str, connection: Connection) -> None:
    """Measures the workload whenever it is asked to, until the other end closes."""
    workload = workloads.build(name, device)
    with LLM(**given) as llm, suppress(EOFError):
        while connection.recv():
            connection.send(workloads.measure(workload, generator(llm, workload.temperature, show=False)))


def started(given: dict[str, Any], name: str, device: str) -> tuple[BaseProcess, Connection]:
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=run_side, args=(given, name, device, theirs))
    process.start()
    theirs.close()
    return process, ours


def measured(side: str, connection: Connection) -> dict[str, float]:
    try:
        connection.send(True)
        return connection.recv()
    except (EOFError, ConnectionError):
        raise SystemExit(f"the engine with {side!r} ended: its error is above") from None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--workloads", default="mixed64,stream-1024")
    parser.add_argument("--common", default="")
    parser.add_argument("--side", action="append", required=True)
    parser.add_argument("--pairs", type=int, default=9)
    args = parser.parse_args()
    for name in args.workloads.split(","):
        common = {
            "model": args.model,
            "device": args.device,
            "max_model_len": workloads.build(name, args.device).max_model_len,
            "enable_prefix_caching": False,
            "kv_cache_memory_bytes": KV_BYTES[args.device],
            **options_of(args.common),
        }
        figures: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        sides = {side: started(common | options_of(side), name, args.device) for side in args.side}
        for round_idx in range(args.pairs + 1):
            first = round_idx % len(sides)  # who runs first in a round is not always the same
            for side, (_, connection) in [*sides.items()][first:] + [*sides.items()][:first]:
                for key, value in measured(side, connection).items():
                    if round_idx:  # the first warms up
                        figures[key][side].append(value)
        for process, connection in sides.values():
            connection.close()
            process.join()
        for key, by_side in figures.items():
            for side in args.side:
                values = by_side[side]
                ratio = median(value / other for value, other in zip(values, by_side[args.side[0]], strict=True))
                print(f"{name:12} {key:14} {side or 'default':28} {median(values):10.2f}   {ratio:.3f}x", flush=True)


if __name__ == "__main__":
    main()
