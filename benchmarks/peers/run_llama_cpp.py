"""Drives llama.cpp through PyPI's `llama-cpp-python`: the GGUF as it is, one stream. Run by `benchmarks/cpu.py`."""

from collections.abc import Sequence
from itertools import islice

import driver
from llama_cpp import Llama


def start_engine(model: str, workload: "driver.workloads.Workload", num_threads: int) -> "driver.workloads.Generate":
    llm = Llama(
        model, n_ctx=workload.max_model_len, n_threads=num_threads, n_threads_batch=num_threads, verbose=False
    )

    def generate(tasks: Sequence["driver.workloads.Task"]) -> int:
        (task,) = tasks
        llm.reset()  # otherwise the cache of the run before answers the prompt
        tokens = llm.generate(task.prompt_token_ids, temp=workload.temperature)  # goes on past end-of-text tokens
        return sum(1 for _ in islice(tokens, task.num_output_tokens))

    return generate


driver.main(start_engine)
