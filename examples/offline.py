"""Many prompts at once, with sampling parameters each: results come back in order."""

from quire import LLM, SamplingParams

with LLM("smollm2") as llm:
    outputs = llm.generate(
        ["The capital of France is", "def add(a, b):", "Once upon a time"],
        [
            SamplingParams(temperature=0, max_tokens=16),
            SamplingParams(temperature=0, max_tokens=32, stop=["\n\n"]),
            SamplingParams(temperature=0.8, top_p=0.95, max_tokens=48, seed=7, n=2),
        ],
    )
    for output in outputs:
        for choice in output.outputs:
            print(f"{output.prompt!r} -> {choice.text!r} ({choice.finish_reason})")
