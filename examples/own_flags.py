"""A program with its own flags beside the engine's, made by the same generator.

python examples/own_flags.py --topic trains --count 2 --dtype float32 --max-model-len 512
python examples/own_flags.py --help
"""

from dataclasses import dataclass

from quire import LLM, EngineConfig, SamplingParams
from quire.config import knob
from quire.config.flags import Parser, add_flags, from_args


@dataclass(frozen=True)
class StoryOptions:
    """The story"""

    topic: str = knob("the sea", "what the story is about")
    count: int = knob(1, "how many stories", low=1)


def main() -> None:
    parser = Parser(description="Tells short stories.")
    add_flags(parser, StoryOptions)
    add_flags(parser, EngineConfig)
    args = parser.parse_args()
    story, config = from_args(StoryOptions, args), from_args(EngineConfig, args)
    with LLM.from_config(config) as llm:
        params = SamplingParams(n=story.count, max_tokens=60, temperature=0.8, seed=1)
        question = [{"role": "user", "content": f"Tell a story of two sentences about {story.topic}."}]
        for choice in llm.chat(question, params)[0].outputs:
            print(f"- {choice.text.strip()}\n")


if __name__ == "__main__":
    main()
