"""Drives llama.cpp through PyPI's `llama-cpp-python`: the GGUF as it is, one stream. Run by `benchmarks/cpu.py`.

`--no-amx` keeps it from repacking weights for AMX, which is how it runs on CPUs without that unit.
"""

import sys
from collections.abc import Sequence
from itertools import islice

import driver
import llama_cpp.llama_cpp as native
from llama_cpp import Llama


def disable_amx() -> None:
    """`Llama` has no argument for this field of its native parameters, so their defaults are changed."""
    defaults = native.llama_model_default_params

    def without_extra_buffers() -> native.llama_model_params:
        params = defaults()
        params.use_extra_bufts = False
        return params

    native.llama_model_default_params = without_extra_buffers


def start_engine(model: str, workload: "driver.workloads.Workload", num_threads: int) -> "driver.workloads.Generate":
    threads = {"n_threads": num_threads, "n_threads_batch": num_threads}
    llm = Llama(model, n_ctx=workload.max_model_len, verbose=False, **threads)

    def generate(tasks: Sequence["driver.workloads.Task"]) -> int:
        (task,) = tasks
        llm.reset()  # otherwise the cache of the run before answers the prompt
        tokens = llm.generate(task.prompt_token_ids, temp=workload.temperature)  # goes on past end-of-text tokens
        return sum(1 for _ in islice(tokens, task.num_output_tokens))

    return generate


if "--no-amx" in sys.argv:
    disable_amx()
driver.main(start_engine)
