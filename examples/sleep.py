"""Give the memory of weights and cache back while the engine has nothing to do: python examples/sleep.py"""

from quire import LLM, SamplingParams

PROMPT = "The capital of France is"


def main() -> None:
    params = SamplingParams(temperature=0, max_tokens=8)
    with LLM("smollm2", max_model_len=1024) as llm:
        before = llm.generate(PROMPT, params, use_tqdm=False)[0].outputs[0].text
        llm.sleep(level=1)  # on a GPU, weights wait in the host's memory; level 2 forgets them
        print("asleep")
        llm.wake_up()
        after = llm.generate(PROMPT, params, use_tqdm=False)[0].outputs[0].text
        print(f"awake, and the answer is the same: {before == after}")


if __name__ == "__main__":
    main()
