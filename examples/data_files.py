"""Answer every question of a JSONL file, in one batch: python examples/data_files.py QUESTIONS.jsonl ANSWERS.jsonl

Without arguments it writes a small file of questions first, into a folder that is removed at the end.
"""

import json
import sys
import tempfile
from pathlib import Path

from quire import LLM, SamplingParams

QUESTIONS = ["What is the capital of France?", "What is the capital of Italy?", "How many days has a week?"]


def answer(questions: Path, answers: Path) -> None:
    entries = [json.loads(line) for line in questions.read_text().splitlines()]
    conversations = [[{"role": "user", "content": entry["question"]}] for entry in entries]
    with LLM("smollm2", max_model_len=1024) as llm:
        outputs = llm.chat(conversations, SamplingParams(temperature=0, max_tokens=32), use_tqdm=False)
    with answers.open("w") as file:
        for entry, output in zip(entries, outputs):
            file.write(json.dumps({**entry, "answer": output.outputs[0].text}) + "\n")


def main() -> None:
    if len(sys.argv) == 3:
        answer(Path(sys.argv[1]), Path(sys.argv[2]))
        return
    with tempfile.TemporaryDirectory() as folder:
        questions, answers = Path(folder) / "questions.jsonl", Path(folder) / "answers.jsonl"
        questions.write_text("".join(json.dumps({"question": text}) + "\n" for text in QUESTIONS))
        answer(questions, answers)
        print(answers.read_text(), end="")


if __name__ == "__main__":
    main()
