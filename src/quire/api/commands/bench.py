"""`quire bench`: one workload, timed; the last line is one JSON object.

Workloads are defined in `api/workloads.py`, for every engine alike; benchmarks/README.md says what they mean.
"""

import json
import sys
import time
from argparse import Namespace
from dataclasses import dataclass
from typing import Literal

from quire.api import workloads
from quire.api.llm import LLM
from quire.config import EngineConfig, knob
from quire.config.flags import from_args
from quire.errors import ConfigError
from quire.params import SamplingParams

HELP = "time a workload: latency, throughput or startup"
USAGE = "quire bench {latency,throughput,startup} --workload W [flags]"

KINDS = {"latency": workloads.LATENCY_WORKLOADS, "throughput": workloads.THROUGHPUT_WORKLOADS, "startup": ()}
FIRST_PROMPT = 8  # tokens, for the first answer after a start


@dataclass(frozen=True)
class BenchOptions:
    """What to time"""

    kind: Literal["latency", "throughput", "startup"] | None = knob(
        None, "latency (one request), throughput (many at once) or startup", positional=True, metavar="KIND"
    )
    workload: str | None = knob(None, "latency: stream-128, stream-1024, stream-8192; throughput: mixed64, mixed256, p1024d128")
    json: bool = knob(False, "print nothing but the JSON line")


OPTIONS = (BenchOptions, EngineConfig)


def run(args: Namespace) -> int:
    options, config = (from_args(cls, args) for cls in OPTIONS)
    if options.kind != "startup" and options.workload not in KINDS[options.kind]:
        raise ConfigError(f"bench {options.kind} needs --workload, one of {', '.join(KINDS[options.kind])}")
    device = "cpu"
    workload = None if options.kind == "startup" else workloads.build(options.workload, device)
    config = config.replace(skip_tokenizer_init=True, enable_prefix_caching=False)
    if workload is not None and config.model.max_model_len is None:
        config = config.replace(max_model_len=workload.max_model_len)
    started = time.perf_counter()
    with LLM.from_config(config) as llm:
        result = {"model": config.model.model, "workload": options.workload or "startup"}
        result["startup_s"] = time.perf_counter() - started
        if workload is None:
            llm.generate(list(range(100, 100 + FIRST_PROMPT)), SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
            result["duration_s"] = time.perf_counter() - started  # to the first token
        else:
            result |= workloads.measure(workload, _generate(llm, workload.temperature, show=not options.json))
    result = {name: round(value, 4) if isinstance(value, float) else value for name, value in result.items()}
    if not options.json:
        for name, value in result.items():
            print(f"{name:<14} {value}", file=sys.stderr)
    print(json.dumps(result))
    return 0


def _generate(llm: LLM, temperature: float, show: bool) -> workloads.Generate:
    def generate(tasks) -> int:
        params = [
            SamplingParams(temperature=temperature, max_tokens=t.num_output_tokens, ignore_eos=True, detokenize=False) for t in tasks
        ]
        outputs = llm.generate([t.prompt_token_ids for t in tasks], params, use_tqdm=show and len(tasks) > 1)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return generate
