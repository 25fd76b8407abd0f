"""Quire on one NVIDIA GPU: checks its results first, then times every workload, and prints one table at the end.

    python benchmarks/gpu.py                                     # everything, some minutes on an H200
    python benchmarks/gpu.py --models qwen3-0.6b --workloads stream-128,mixed256 --skip-checks --json out.json
    python benchmarks/gpu.py --models qwen3-0.6b --workloads soak --skip-checks    # five minutes: does memory grow?

Models are folders of `shapes/`, with random weights: bf16, or quantized as config.json says; `qwen3-8b:fp8` is one
quantized by `--quantization fp8`, `qwen3-8b@int8` one with `--kv-cache-dtype int8`, `qwen3-8b+ngram` one with more
options (OPTIONS below). Of models with experts it prints how many of them a step uses. The figures of vLLM and the
floors are those of `benchmarks/README.md`, for an H200. The exit status is 1 when a check fails or a bar is missed.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

MODELS = ("qwen3-0.6b", "qwen3-8b")
SOAK_S = 300
WORKLOADS = ("startup", "stream-128", "stream-1024", "stream-8192", "mixed256", "p1024d128")
CHECKS = (
    "tests/ops/test_triton_attention.py",
    "tests/ops/test_triton_elementwise.py",
    "tests/ops/test_triton_linear.py",
    "tests/ops/test_triton_sampling.py",
    "tests/ops/test_triton_step.py",
    "tests/ops/test_triton_mask.py",
    "tests/ops/test_triton_blocks.py",
    "tests/ops/test_triton_moe.py",
    "tests/ops/test_triton_mla.py",
    "tests/ops/test_offsets.py",
    "tests/worker/test_gpu.py",
)
UNITS = {
    "startup_s": "s",
    "first_token_s": "s",
    "first_start_s": "s",
    "import_s": "s",
    "ttft_ms": "ms",
    "tpot_ms": "ms",
    "out_tok_s": "tok/s",
    "req_s": "req/s",
    "growth_mib": "MiB",
    "copy_share": "of copy bandwidth",
    "kv_tokens": "tokens",
}
LOWER_IS_BETTER = {"growth_mib", "startup_s", "first_token_s", "first_start_s", "import_s", "ttft_ms", "tpot_ms"}

SYNTHETIC = {"method": "ngram", "num_speculative_tokens": 4, "rejection_sample_method": "synthetic"}
OPTIONS: dict[str, dict[str, Any]] = {
    "mp": {"distributed_executor_backend": "mp"},  # the worker in a process of its own
    "ngram": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}},
    # Each of four drafts is right with a probability of 0.8, if those before it are.
    "drafts": {"speculative_config": SYNTHETIC | {"synthetic_acceptance_rates": [0.8, 0.64, 0.512, 0.4096]}},
    # Four drafts are verified in every step, and all are right: a step takes the time of five tokens.
    "verify": {"speculative_config": SYNTHETIC | {"synthetic_acceptance_rates": [1.0] * 4}},
}

# (model, workload, metric) -> (vLLM 0.25.0, physical floor, our bar); None where there is none.
FIGURES = {
    ("qwen3-0.6b", "startup", "first_start_s"): (None, None, 60),
    ("qwen3-0.6b", "startup", "first_token_s"): (69, None, 8),
    ("qwen3-0.6b", "stream-128", "ttft_ms"): (13.7, None, None),
    ("qwen3-0.6b", "stream-128", "tpot_ms"): (2.58, 0.28, 0.9),
    ("qwen3-0.6b", "stream-1024", "ttft_ms"): (33.8, None, None),
    ("qwen3-0.6b", "stream-1024", "tpot_ms"): (2.73, 0.31, None),
    ("qwen3-0.6b", "stream-8192", "ttft_ms"): (37.8, 27, 34),
    ("qwen3-0.6b", "stream-8192", "tpot_ms"): (2.25, 0.5, None),
    ("qwen3-0.6b", "mixed256", "out_tok_s"): (22_670, 32_000, 26_000),
    ("qwen3-0.6b", "p1024d128", "req_s"): (114.5, 160, 135),
    ("qwen3-8b", "startup", "first_start_s"): (None, None, 60),
    ("qwen3-8b", "startup", "first_token_s"): (69, None, 12),
    ("qwen3-8b", "stream-128", "ttft_ms"): (13.3, None, None),
    ("qwen3-8b", "stream-128", "tpot_ms"): (5.23, 3.5, 4.8),
    ("qwen3-8b", "stream-1024", "ttft_ms"): (27.3, None, None),
    ("qwen3-8b", "stream-1024", "tpot_ms"): (5.30, 3.55, None),
    ("qwen3-8b", "stream-8192", "ttft_ms"): (215, 190, 212),
    ("qwen3-8b", "stream-8192", "tpot_ms"): (5.59, 3.8, None),
    ("qwen3-8b", "mixed256", "out_tok_s"): (9_210, 10_800, 9_700),
    ("qwen3-8b", "p1024d128", "req_s"): (28.6, 31, 29),
    ("qwen3-30b-a3b", "startup", "first_start_s"): (None, None, 60),
    ("qwen3-30b-a3b", "startup", "first_token_s"): (115, None, 25),
    ("qwen3-30b-a3b", "stream-128", "ttft_ms"): (21.9, None, None),
    ("qwen3-30b-a3b", "stream-128", "tpot_ms"): (4.22, 1.4, 3.2),
    ("qwen3-30b-a3b", "stream-1024", "ttft_ms"): (66.7, None, None),
    ("qwen3-30b-a3b", "stream-1024", "tpot_ms"): (4.33, 1.45, None),
    ("qwen3-30b-a3b", "stream-8192", "ttft_ms"): (162, None, None),
    ("qwen3-30b-a3b", "stream-8192", "tpot_ms"): (4.50, 1.6, None),
    ("qwen3-30b-a3b", "mixed256", "out_tok_s"): (5_540, None, 6_600),
    ("qwen3-30b-a3b", "p1024d128", "req_s"): (29.0, None, 32),
    ("qwen3-8b:fp8", "startup", "first_token_s"): (None, None, 8),
    ("qwen3-8b:fp8", "stream-128", "tpot_ms"): (3.70, 1.9, 2.5),
    ("qwen3-8b:fp8", "stream-8192", "ttft_ms"): (149.7, 126, 145),
    ("qwen3-8b:fp8", "mixed256", "out_tok_s"): (11_200, 17_900, 12_800),
    ("qwen3-8b:fp8", "p1024d128", "req_s"): (40.3, 63, 45),
    ("qwen3-8b-awq", "stream-128", "tpot_ms"): (4.48, 1.13, 1.8),
    ("qwen3-8b-awq", "mixed256", "out_tok_s"): (9_320, 14_200, 10_000),
    ("qwen3-8b-awq", "p1024d128", "req_s"): (32.1, 38.5, 32.5),
    ("qwen3-8b-q4_k_m:gguf", "stream-128", "tpot_ms"): (None, 1.1, 2.0),
    ("qwen3-30b-a3b-fp8-block", "stream-128", "tpot_ms"): (None, 0.8, 1.9),
    ("qwen3-30b-a3b-fp8-block", "mixed256", "out_tok_s"): (None, 13_700, 9_500),
    ("gpt-oss-20b-mxfp4", "stream-128", "tpot_ms"): (3.05, 0.86, 1.5),
    ("gpt-oss-20b-mxfp4", "mixed256", "out_tok_s"): (10_350, 28_600, 16_000),
    ("gpt-oss-20b-mxfp4", "p1024d128", "req_s"): (46.1, 96, 58),
    ("qwen3-0.6b@fp8", "mixed256", "out_tok_s"): (None, 63_000, 36_000),
    ("qwen3-8b@fp8", "mixed256", "out_tok_s"): (None, None, 11_800),
    ("qwen3-8b:fp8@fp8", "mixed256", "out_tok_s"): (None, None, 15_000),
    ("qwen3-8b+verify", "stream-128", "tpot_ms"): (None, 0.7, 0.92),
    ("qwen3-8b+drafts", "stream-128", "tpot_ms"): (None, None, 1.5),
    ("qwen3-0.6b+drafts", "stream-128", "tpot_ms"): (None, None, 0.355),
    ("decode attention", "auto", "copy_share"): (None, 1.0, 0.95),
    ("decode attention", "fp8", "copy_share"): (None, 1.0, 0.90),
    ("decode attention", "int8", "copy_share"): (None, 1.0, 0.90),
    ("qwen3-0.6b", "soak", "growth_mib"): (None, None, 8),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--skip-checks", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)  # a model, in a process of its own
    args = parser.parse_args()
    workloads = args.workloads.split(",")
    if args.one:
        print(json.dumps(time_model(args.one, workloads)))
        return 0
    failed = [] if args.skip_checks else check()
    rows: list[tuple[str, str, str, float]] = []
    if not args.skip_checks:
        for cache_dtype in ("auto", "fp8", "int8"):
            rows.append(("decode attention", cache_dtype, "copy_share", decode_attention_share(cache_dtype)))
    for model in args.models.split(","):
        print(f"{model} …", flush=True)
        try:
            if "startup" in workloads:
                rows.append((model, "startup", "first_start_s", first_start_s(model)))
                in_own_process(model, ["startup"])  # fills the caches, for the start that is timed below
            rows += [(model, *entry) for entry in in_own_process(model, workloads)]
        except subprocess.CalledProcessError as error:
            failed.append(f"{model}: exit {error.returncode}")
    missed = report(rows, args.json)
    for line in failed:
        print("FAILED:", line)
    return 1 if failed or missed else 0


# ---- checks ----


def check() -> list[str]:
    """What differs: kernels from their float32 twins, then the engine on the GPU from the engine on the CPU."""
    failed = []
    files = [file for file in CHECKS if (ROOT / file).exists()]
    if subprocess.run([sys.executable, "-m", "pytest", "-q", "-x", *files], cwd=ROOT).returncode:
        failed.append("a kernel differs from its twin: see above")
    if subprocess.run([sys.executable, str(ROOT / "benchmarks" / "gpu_exact.py")], cwd=ROOT).returncode:
        failed.append("tokens differ between GPU and CPU: see above")
    return failed


def decode_attention_share(cache_dtype: str) -> float:
    """The bandwidth of decode attention as a share of a copy's: 256 rows x 1,000 tokens, 32 query heads, 8 KV heads of
    128. Scales of codes count as bytes read."""
    import torch

    from quire.ops.attention.reference import AttentionTables
    from quire.ops.attention.triton import paged_attention, work_shape
    from quire.ops.attention.work import plan

    rows, context, H, K, D, copies = 256, 1000, 32, 8, 128, 3
    size = 16 if cache_dtype == "auto" else 64  # the default
    per_row = -(-context // size)
    num_blocks = rows * per_row * copies
    cache = torch.randn(num_blocks, 2, size, K, D, device="cuda", dtype=torch.bfloat16)
    scales = None
    bytes_per_token = 2 * K * D * 2
    if cache_dtype != "auto":
        to = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}[cache_dtype]
        cache = (cache * 30).to(to)
        scales = torch.rand(num_blocks, 2, size, K, device="cuda") * 0.1
        bytes_per_token = 2 * K * (D + 4)
    q = torch.randn(rows, H, D, device="cuda", dtype=torch.bfloat16)
    starts = torch.arange(rows + 1, device="cuda", dtype=torch.int32)
    lens = torch.full((rows,), context, device="cuda", dtype=torch.int32)
    shape = work_shape(q.dtype, H, K, D, decode=True, has_codes=scales is not None)
    tables = []
    for part in torch.randperm(num_blocks, device="cuda").int().view(copies, rows, per_row):
        table = AttentionTables(starts, lens, part.contiguous(), size, max_query_len=1)
        tables.append(replace(table, work=(plan(q, table, shape),)))
    turns = itertools.cycle(tables)
    attention_s = time_gpu(lambda: paged_attention(q, cache, next(turns), scale=D**-0.5, scales=scales))
    source = torch.randn(1 << 29, device="cuda")
    target = torch.empty_like(source)
    copy_s = time_gpu(lambda: target.copy_(source))
    attention_rate = rows * context * bytes_per_token / attention_s
    copy_rate = 2 * source.nbytes / copy_s
    print(f"decode attention, {cache_dtype}: {attention_s * 1e6:.0f} us, {attention_rate / 1e12:.2f} TB/s", end="; ")
    print(f"copy {copy_rate / 1e12:.2f} TB/s", flush=True)
    return attention_rate / copy_rate


def time_gpu(run, times: int = 30) -> float:
    """Median seconds of one run, by the device's clock."""
    import torch

    for _ in range(5):
        run()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(times + 1)]
    marks[0].record()
    for mark in marks[1:]:
        run()
        mark.record()
    torch.cuda.synchronize()
    return median(a.elapsed_time(b) for a, b in zip(marks, marks[1:])) / 1e3


def first_start_s(model: str) -> float:
    """Seconds to the first token where Triton has nothing compiled yet."""
    with tempfile.TemporaryDirectory() as empty:
        rows = in_own_process(model, ["startup"], {"TRITON_CACHE_DIR": empty})
    return next(value for _, metric, value in rows if metric == "first_token_s")


def in_own_process(model: str, workloads: list[str], environment: dict[str, str] = {}) -> list[tuple[str, str, float]]:
    command = [sys.executable, __file__, "--one", model, "--workloads", ",".join(workloads)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=os.environ | environment)
    return json.loads(done.stdout.splitlines()[-1])


# ---- one model, in its own process ----


def open_model(name: str, max_model_len: int):
    """An `LLM` with random weights: folder[:quantization][@dtype of the KV cache][+OPTIONS]."""
    from quire import LLM

    name, _, options = name.partition("+")
    name, _, cache_dtype = name.partition("@")
    folder, _, quantization = name.partition(":")
    return LLM(
        str(ROOT / "benchmarks" / "shapes" / folder),
        load_format="dummy",
        quantization=quantization or "auto",
        kv_cache_dtype=cache_dtype or "auto",
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_model_len=max_model_len,
        **OPTIONS.get(options, {}),
    )


def time_model(model: str, names: list[str]) -> list[tuple[str, str, float]]:
    """(workload, metric, value) of each workload, on one engine."""
    started = time.perf_counter()
    import torch  # noqa: F401

    import quire.worker.gpu.device  # noqa: F401
    from quire import SamplingParams
    from quire.api.commands.bench import generator
    from quire.bench import workloads

    rows = [("startup", "import_s", time.perf_counter() - started)]
    work = [workloads.build(name, "cuda") for name in names if name not in ("startup", "soak")]
    longest = max([w.max_model_len for w in work], default=2048)
    started = time.perf_counter()
    with open_model(model, longest) as llm:
        rows.append(("startup", "startup_s", time.perf_counter() - started))
        llm.generate(list(range(100, 108)), SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
        rows.append(("startup", "first_token_s", time.perf_counter() - started))
        rows.append(("startup", "kv_tokens", llm.client.engine.kv.num_tokens))
        # The steps after a start also record graphs, one each: so many that none is left when the clock runs.
        many = SamplingParams(temperature=0.6, max_tokens=longest - 16, ignore_eos=True)
        for _ in range(1 + 1024 // longest):
            llm.generate(list(range(100, 108)), many, use_tqdm=False)
        for workload in work:
            found = workloads.measure(workload, generator(llm, workload.temperature, show=False))
            if workload.is_latency:
                metrics = ["ttft_ms", "tpot_ms"]
            else:
                metrics = ["out_tok_s" if workload.name == "mixed256" else "req_s"]
            rows += [(workload.name, metric, found[metric]) for metric in metrics]
            figures = ", ".join(f"{metric} {found[metric]:.2f}" for metric in metrics)
            print(f"  {workload.name}: {figures}", file=sys.stderr, flush=True)
        print_drafts(llm)
        print_experts_used(llm)
        if "soak" in names:
            rows.append(("soak", "growth_mib", memory_growth_mib(generator(llm, 0.6, show=False))))
    return rows


def print_drafts(llm) -> None:
    """How many drafts were right, if any were verified."""
    stats = llm.client.engine.stats()
    if stats.num_drafts:
        accepted = sum(stats.accepted_drafts)
        print(
            f"  drafts: {stats.num_draft_tokens / stats.num_drafts:.2f} verified in a step, "
            f"{accepted / stats.num_draft_tokens:.0%} right, {1 + accepted / stats.num_drafts:.2f} tokens a step; "
            f"{stats.num_drafts:,} steps of rows",
            file=sys.stderr,
            flush=True,
        )


def print_experts_used(llm) -> None:
    """How many experts each layer uses for the 256 tokens of a prompt, in a step that is not recorded."""
    import random

    from quire import SamplingParams
    from quire.layers.experts import triton as backend

    route, used = backend.route, []

    def counting(*args):
        weights, expert_ids = route(*args)
        used.append(len(expert_ids.unique()))
        return weights, expert_ids

    backend.route = counting
    prompt = random.Random(0).choices(range(10, 10_000), k=256)
    # Steps with prompt logprobs are launched kernel by kernel.
    llm.generate([prompt], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    backend.route = route
    if used:
        mean = sum(used) / len(used)
        print(
            f"  experts used by 256 tokens: {mean:.1f} of a layer's, {min(used)} at least", file=sys.stderr, flush=True
        )


def memory_growth_mib(generate) -> float:
    """How much more memory of the card is in use after SOAK_S seconds of mixed256 than after its first run."""
    import torch

    from quire.bench import workloads

    tasks = workloads.build("mixed256", "cuda").tasks
    used = []
    started = time.perf_counter()
    while time.perf_counter() - started < SOAK_S:
        generate(tasks)
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        used.append((total - free) / 2**20)
    line = f"  soak: {len(used)} runs, {used[0]:.0f} MiB after the first, {used[-1]:.0f} after the last"
    print(line, file=sys.stderr, flush=True)
    return used[-1] - used[0]


# ---- the table ----


def report(rows: list[tuple[str, str, str, float]], path: Path | None) -> int:
    """Prints the table, writes the results, and returns how many bars are missed."""
    missed = 0
    results = []
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    # In a copy of the files, git may know only an older commit: whoever made the copy sets COMMIT.
    commit = os.environ.get("COMMIT") or git.stdout.strip()
    print(f"\n{'model':<18}{'workload':<13}{'metric':<15}{'Quire':>10}{'vLLM':>10}{'ratio':>7}{'floor':>10}{'bar':>9}")
    for model, workload, metric, value in rows:
        peer, floor, bar = FIGURES.get((model, workload, metric), (None, None, None))
        is_lower_better = metric in LOWER_IS_BETTER
        is_missed = bar is not None and (value > bar if is_lower_better else value < bar)
        missed += is_missed
        ratio = ""
        if peer:
            ratio = f"{peer / value if is_lower_better else value / peer:.2f}x"
        peer_text = "" if peer is None else f"{peer:,.2f}"
        floor_text = f"{floor:,}" if floor else ""
        bar_text = f"{bar:,}" if bar else ""
        print(
            f"{model:<18}{workload:<13}{metric:<15}{value:>10,.2f}{peer_text:>10}{ratio:>7}"
            f"{floor_text:>10}{bar_text:>9}{'  MISSED' if is_missed else ''}"
        )
        results.append(
            {
                "model": model,
                "workload": workload,
                "metric": metric,
                "value": round(value, 4),
                "unit": UNITS[metric],
                "peer": peer,
                "floor": floor,
                "commit": commit,
            }
        )
    if path:
        path.write_text(json.dumps(results, indent=1) + "\n")
    return missed


if __name__ == "__main__":
    sys.exit(main())
