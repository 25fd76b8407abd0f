"""What every peer's driver shares: its command line, the workload, the clock and the one line of JSON it prints.

Imported by the `run_*.py` scripts beside it, inside each peer's own environment, where Quire is not installed:
the workloads are therefore loaded by file path. Standard library only; must not know any engine.
"""

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType


def _load_workloads() -> ModuleType:
    path = Path(__file__).resolve().parents[2] / "src" / "quire" / "bench" / "workloads.py"
    spec = importlib.util.spec_from_file_location("workloads", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["workloads"] = module  # dataclasses look their module up by name
    spec.loader.exec_module(module)
    return module


workloads = _load_workloads()

# Builds an engine from (model path, workload, number of threads) and returns its way to generate.
StartEngine = Callable[[str, "workloads.Workload", int], "workloads.Generate"]


def main(start_engine: StartEngine) -> None:
    parser = argparse.ArgumentParser(description="Time one workload on one peer; the last line is a JSON object.")
    parser.add_argument("--model", required=True, help="a .gguf for llama.cpp, a Hugging Face folder for the others")
    parser.add_argument("--workload", required=True)
    parser.add_argument("--threads", type=int, default=2)
    args, _ = parser.parse_known_args()  # a driver may have options of its own
    workload = workloads.build(args.workload, device="cpu")

    start = time.perf_counter()
    generate = start_engine(args.model, workload, args.threads)
    startup_s = time.perf_counter() - start

    figures = {"startup_s": startup_s, **workloads.measure(workload, generate)}
    print(json.dumps({key: round(value, 4) for key, value in figures.items()}), flush=True)
