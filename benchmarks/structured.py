"""What a JSON schema on every row costs: a workload with and without, and how long a schema takes to compile.

    python benchmarks/structured.py                                                  # mixed64, the default model
    python benchmarks/structured.py --workload mixed256 --model benchmarks/shapes/qwen3-0.6b --load-format dummy \\
        --tokenizer FOLDER

No row may end early (the schema asks for more items than fit), so that both sides write the same number of tokens.
Sides alternate; medians. Exit status 1 below 90% of the unconstrained throughput.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

BAR = 0.9
PERSON = {
    "type": "object",
    "properties": {
        "id": {"type": "integer"},
        "name": {"type": "string"},
        "kind": {"enum": ["person", "company", "place"]},
        "active": {"type": "boolean"},
        "score": {"type": "number"},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 4},
    },
    "required": ["id", "name", "kind", "active", "score", "tags"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": PERSON, "minItems": 500}


def large_schema(num_chars: int = 5000) -> dict:
    """An object of many typical properties, new each time: nothing of it is cached."""
    kinds = [{"type": "string"}, {"type": "integer"}, PERSON, {"type": "array", "items": {"type": "number"}}]
    properties: dict[str, dict] = {}
    while len(json.dumps(properties)) < num_chars:
        name = f"field_{time.time_ns() % 10**9}_{len(properties)}"
        properties[name] = kinds[len(properties) % len(kinds)]
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokenizer")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--workload", default="mixed64")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--engine", default="auto", help="structured_outputs_backend")
    args = parser.parse_args()

    from quire import LLM, SamplingParams, StructuredOutputs
    from quire.bench import workloads
    from quire.config.resolve import choose_device
    from quire.frontend.model import machine

    workload = workloads.build(args.workload, choose_device("auto", machine()))
    options = {
        "tokenizer": args.tokenizer,
        "load_format": args.load_format,
        "enable_prefix_caching": False,
        "max_model_len": workload.max_model_len,
        "structured_outputs_backend": args.engine,
    }
    with LLM(args.model, **options) as llm:

        def run(shape: StructuredOutputs | None, tasks: list[workloads.Task]) -> float:
            """Tokens per second."""
            params = []
            for idx, task in enumerate(tasks):
                one = SamplingParams(
                    temperature=workload.temperature,
                    max_tokens=task.num_output_tokens,
                    ignore_eos=True,
                    detokenize=False,
                    seed=idx,
                    structured_outputs=shape,
                )
                params.append(one)
            started = time.perf_counter()
            outputs = llm.generate([task.prompt_token_ids for task in tasks], params, use_tqdm=False)
            seconds = time.perf_counter() - started
            num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
            if num_tokens != sum(task.num_output_tokens for task in tasks):
                raise RuntimeError(f"{num_tokens} tokens were generated: a row ended early")
            return num_tokens / seconds

        one_token = [workloads.Task(workload.tasks[0].prompt_token_ids, 1)]
        large = StructuredOutputs(json=large_schema())
        shapes = {
            "the first grammar (the engine starts)": StructuredOutputs(json={"type": "integer"}),
            "a schema of 5 kB": large,
            "the same again": large,
            "another of 5 kB": StructuredOutputs(json=large_schema()),
        }
        times = {}
        for what, shape in shapes.items():
            started = time.perf_counter()
            run(shape, one_token)
            times[what] = time.perf_counter() - started
        shaped = StructuredOutputs(json=SCHEMA)
        run(shaped, workload.tasks)
        run(None, workload.tasks)
        without_schema, with_schema = [], []
        for _ in range(args.runs):
            without_schema.append(run(None, workload.tasks))
            with_schema.append(run(shaped, workload.tasks))
    for what, seconds in times.items():
        print(f"time to a first token with {what:<40} {seconds * 1e3:8.1f} ms")
    ratio = median(with_schema) / median(without_schema)
    print(
        f"{args.workload}: {median(without_schema):,.0f} tok/s without, "
        f"{median(with_schema):,.0f} with a schema on every row: {ratio:.1%}"
    )
    print(f"  without {list(map(round, without_schema))}, with {list(map(round, with_schema))}")
    return ratio < BAR


if __name__ == "__main__":
    sys.exit(main())
