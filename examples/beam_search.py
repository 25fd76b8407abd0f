"""The most likely answers as a whole, instead of the most likely token each time."""

from quire import LLM, BeamSearchParams, TextPrompt

with LLM("smollm2", max_model_len=512) as llm:
    prompts = [TextPrompt(prompt="The capital of France is"), TextPrompt(prompt="Water freezes at")]
    outputs = llm.beam_search(prompts, BeamSearchParams(beam_width=3, max_tokens=8))
    for output in outputs:
        for sequence in output.sequences:
            print(f"{sequence.cum_logprob:8.3f}  {sequence.text!r}")
