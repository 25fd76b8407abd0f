"""Drives Hugging Face `transformers` in bfloat16, one stream, default attention. Run by `benchmarks/cpu.py`."""

from collections.abc import Sequence

import driver
import torch
from transformers import AutoModelForCausalLM


def start_engine(model: str, workload: "driver.workloads.Workload", num_threads: int) -> "driver.workloads.Generate":
    torch.set_num_threads(num_threads)
    llm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
    llm.generation_config.eos_token_id = None  # ignore_eos

    def generate(tasks: Sequence["driver.workloads.Task"]) -> int:
        (task,) = tasks
        prompt = torch.tensor([task.prompt_token_ids])
        output = llm.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=task.num_output_tokens, do_sample=False
        )
        return output.shape[1] - prompt.shape[1]

    return generate


driver.main(start_engine)
