"""A model that says what its prompt tells it to: the first message holds a script of answers, one for each turn.

Used as `--executor tests.scripted`, with a template for ChatML: `script("first answer", "second answer")` is the system
text. `{last}` in an answer stands for the last result of a tool.
"""

import re

from quire.checkpoint.find import find
from quire.config import EngineConfig
from quire.executor.echo import EchoExecutor
from quire.frontend.tokenizer import Tokenizer
from quire.step import StepPlan

START, BETWEEN, END = "SCRIPT[", "|NEXT|", "]SCRIPT"
_SCRIPT = re.compile(re.escape(START) + "(.*?)" + re.escape(END), re.DOTALL)
_RESULT = re.compile("<tool_response>\n(.*?)\n</tool_response>", re.DOTALL)


def script(*answers: str) -> str:
    return START + BETWEEN.join(answers) + END


class ScriptedExecutor(EchoExecutor):
    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.tokenizer = Tokenizer.from_files(find(config.model.model))

    def forward(self, plan: StepPlan) -> None:
        """The echo model repeats from the beginning what it is given: here the prompt with its answer."""
        for start in plan.new_rows:
            prompt = start.token_ids[: start.num_prompt_tokens]
            text = self.tokenizer.decode(prompt, skip_special_tokens=False)
            answer = self.tokenizer.encode(answer_to(text) + "<|im_end|>", add_special_tokens=False)
            self.prompts[start.row] = [*prompt, *answer], len(prompt) + len(answer)


def answer_to(prompt: str) -> str:
    found = _SCRIPT.search(prompt)
    answers = found[1].split(BETWEEN) if found else ["I have no script."]
    turn = prompt.count("<|im_start|>assistant") - 1
    results = _RESULT.findall(prompt)
    return answers[min(turn, len(answers) - 1)].replace("{last}", results[-1] if results else "")


EXECUTOR = ScriptedExecutor
