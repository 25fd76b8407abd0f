"""`quire bench`: one workload, timed; the last line is one JSON object.

Workloads are defined in `bench/workloads.py`, for every engine alike; `bench serve` sends a server the load of
`bench/loadgen.py`. benchmarks/README.md says what they mean.
"""

import asyncio
import json
import math
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from quire.api.llm import LLM
from quire.bench import workloads
from quire.config import EngineConfig, knob
from quire.config.fields import check
from quire.config.flags import from_args
from quire.config.resolve import choose_device
from quire.errors import ConfigError
from quire.frontend.model import machine
from quire.params import SamplingParams

HELP = "time a workload: latency, throughput or startup of an engine, or a server under load"
USAGE = """quire bench {latency,throughput,startup} --workload W [flags]
       quire bench serve --base-url URL --concurrency C [flags]"""

WORKLOADS = {"latency": workloads.LATENCY_WORKLOADS, "throughput": workloads.THROUGHPUT_WORKLOADS}
FIRST_PROMPT = 8  # tokens, for the first answer after a start
BUSY = 0.8  # of a core: what a client process may use before it becomes part of what it measures


@dataclass(frozen=True)
class BenchOptions:
    """What to time"""

    kind: Literal["latency", "throughput", "startup", "serve"] | None = knob(
        None,
        "latency (one request), throughput (many at once), startup, or serve (a server that runs)",
        positional=True,
        metavar="KIND",
    )
    workload: str | None = knob(
        None, "latency: stream-128, stream-512, stream-1024, stream-8192; throughput: mixed64, mixed256, p1024d128"
    )
    json: bool = knob(False, "print nothing but the JSON line")


@dataclass(frozen=True)
class BenchServeOptions:
    """bench serve: what to send to an OpenAI-compatible server"""

    base_url: str | None = knob(None, "the server's address (default: http://HOST:PORT)")
    host: str = knob("127.0.0.1", "the server's machine")
    port: int = knob(8000, "its port", low=1, high=65535)
    model: str = knob("", "the model's name in requests (default: the first that the server has)")
    endpoint: Literal["completions", "chat"] | None = knob(
        None, "what to call: /v1/completions or /v1/chat/completions (default: by --backend)"
    )
    backend: Literal["vllm", "openai", "openai-chat"] = knob("openai", "openai-chat: call chat; as vllm bench serve")
    dataset_name: Literal["random"] = knob("random", "what prompts are made of: random words")
    concurrency: int | None = knob(
        None,
        "requests in flight at most (default: 1; with --request-rate no limit)",
        low=1,
        names=("--max-concurrency",),
    )
    num_prompts: int = knob(100, "requests in all", low=1)
    input_len: int = knob(
        128, "tokens of a prompt; words, where the server has no /tokenize", low=1, names=("--random-input-len",)
    )
    output_len: int = knob(
        128, "tokens of an answer at most; exactly, with --ignore-eos", low=1, names=("--random-output-len",)
    )
    request_rate: float | None = knob(
        None,
        "requests per second, arriving at random (Poisson); inf or left out: the next when one is answered",
        low=0.001,
    )
    num_client_processes: int = knob(1, "processes that send: more where client_cpu_share nears 1", low=1)
    api_key: str | None = knob(None, "the key to send")
    ignore_eos: bool = knob(False, "ask for answers of full length (not part of OpenAI's protocol)")
    seed: int = knob(0, "of prompts and arrivals", low=0)

    def __post_init__(self) -> None:
        if self.request_rate == math.inf:  # how a closed loop is spelled elsewhere
            object.__setattr__(self, "request_rate", None)
        check(self)


def options_of(argv: Sequence[str]) -> tuple[type, ...]:
    """A server's load needs no engine."""
    return (BenchOptions, BenchServeOptions) if "serve" in argv else (BenchOptions, EngineConfig)


def run(args: Namespace) -> int:
    options = from_args(BenchOptions, args)
    result = _serve(args, options) if options.kind == "serve" else _engine(args, options)
    result = _rounded(result)
    if not options.json:
        for name, value in result.items():
            if isinstance(value, dict):
                shown = "  ".join(f"{part} {number}" for part, number in value.items())
            else:
                shown = value
            print(f"{name:<20} {shown}", file=sys.stderr)
    print(json.dumps(result))
    return 1 if result.get("num_errors") else 0


def _serve(args: Namespace, options: BenchOptions) -> dict[str, Any]:
    from tqdm import tqdm

    from quire.bench.loadgen import Load, measure

    serve = from_args(BenchServeOptions, args)
    default_concurrency = 1 if serve.request_rate is None else None
    load = Load(
        base_url=serve.base_url or f"http://{serve.host}:{serve.port}",
        model=serve.model,
        num_prompts=serve.num_prompts,
        input_len=serve.input_len,
        output_len=serve.output_len,
        concurrency=serve.concurrency or default_concurrency,
        request_rate=serve.request_rate,
        endpoint=serve.endpoint or ("chat" if serve.backend == "openai-chat" else "completions"),
        api_key=serve.api_key,
        ignore_eos=serve.ignore_eos,
        seed=serve.seed,
    )
    with tqdm(total=load.num_prompts, unit="req", disable=options.json) as bar:
        result = asyncio.run(measure(load, serve.num_client_processes, lambda num_done: bar.update(num_done - bar.n)))
    if result["client_cpu_share"] > BUSY:
        warning = "the clients were busy and may have slowed the measurement: raise --num-client-processes"
        print(f"quire: {warning}", file=sys.stderr)
    return result


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(part) for name, part in value.items()}
    return round(value, 4) if isinstance(value, float) else value


def _engine(args: Namespace, options: BenchOptions) -> dict[str, Any]:
    config = from_args(EngineConfig, args)
    name = options.workload or ""
    choices = WORKLOADS.get(options.kind or "", ())
    if options.kind != "startup" and name not in choices:
        raise ConfigError(f"bench {options.kind} needs --workload, one of {', '.join(choices)}")
    device = choose_device(config.device.device, machine())
    workload = None if options.kind == "startup" else workloads.build(name, device)
    config = config.replace(skip_tokenizer_init=True, enable_prefix_caching=False)
    if workload is not None and config.model.max_model_len is None:
        config = config.replace(max_model_len=workload.max_model_len)
    started = time.perf_counter()
    with LLM.from_config(config) as llm:
        result: dict[str, Any] = {"model": config.model.model, "workload": name or "startup"}
        result["startup_s"] = time.perf_counter() - started
        if workload is None:
            prompt = list(range(100, 100 + FIRST_PROMPT))
            llm.generate(prompt, SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
            result["duration_s"] = time.perf_counter() - started  # to the first token
        else:
            result |= workloads.measure(workload, generator(llm, workload.temperature, show=not options.json))
    return result


def generator(llm: LLM, temperature: float, show: bool) -> workloads.Generate:
    def params_of(task: workloads.Task) -> SamplingParams:
        num_tokens = task.num_output_tokens
        return SamplingParams(temperature=temperature, max_tokens=num_tokens, ignore_eos=True, detokenize=False)

    def generate(tasks: Sequence[workloads.Task]) -> int:
        prompts = [task.prompt_token_ids for task in tasks]
        params = [params_of(task) for task in tasks]
        outputs = llm.generate(prompts, params, use_tqdm=show and len(tasks) > 1)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return generate
