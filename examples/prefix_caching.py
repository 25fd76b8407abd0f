"""Prompts that begin alike are computed once: the second time their beginning comes from the cache."""

from quire import LLM, SamplingParams

MANUAL = "A manual. " + " ".join(f"Step {step}: turn wheel {step} until it clicks." for step in range(1, 40)) + "\n"
QUESTIONS = ["Question: which wheel comes first?\nAnswer:", "Question: what does step 7 say?\nAnswer:"]

with LLM("smollm2", max_model_len=2048) as llm:
    params = SamplingParams(temperature=0, max_tokens=16)
    for question in QUESTIONS:
        output = llm.generate(MANUAL + question, params, use_tqdm=False)[0]
        cached, total = output.num_cached_tokens, len(output.prompt_token_ids)
        times = output.metrics
        print(f"{cached} of {total} prompt tokens were cached, first token after {times.first_token_latency:.3f} s")
    print("forgotten:", llm.reset_prefix_cache())
    output = llm.generate(MANUAL + QUESTIONS[0], params, use_tqdm=False)[0]
    print(f"{output.num_cached_tokens} of {len(output.prompt_token_ids)} prompt tokens were cached")
