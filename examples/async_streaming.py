"""Two answers at once, word by word, from an engine in a process of its own."""

import asyncio

from quire import AsyncEngineArgs, AsyncLLM, RequestOutputKind, SamplingParams


async def stream(engine: AsyncLLM, request_id: str, prompt: str) -> str:
    params = SamplingParams(temperature=0, max_tokens=24, output_kind=RequestOutputKind.DELTA)
    parts = []
    async for output in engine.generate(prompt, params, request_id):
        parts.append(output.outputs[0].text)
        print(f"{request_id}: {parts[-1]!r}")
    return "".join(parts)


async def main() -> None:
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model="smollm2", max_model_len=512))
    try:
        prompts = ["The capital of France is", "The sea is"]
        answers = await asyncio.gather(*(stream(engine, f"request-{i}", prompt) for i, prompt in enumerate(prompts)))
        for prompt, answer in zip(prompts, answers):
            print(f"{prompt!r} -> {answer!r}")
    finally:
        engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
