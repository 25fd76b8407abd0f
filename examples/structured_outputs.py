"""Answers with a shape: one of a few words, a regular expression, a JSON schema."""

import json

from quire import LLM, SamplingParams, StructuredOutputsParams

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def asked(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


with LLM("smollm2", max_model_len=1024) as llm:
    questions = [
        "Is this review good or bad? 'I loved every minute of it.'",
        "Write the date of the first of May 2024 as year-month-day.",
        "Write a person as JSON: Alice, who is 30 years old.",
    ]
    shapes = [
        StructuredOutputsParams(choice=["good", "bad"]),
        StructuredOutputsParams(regex=r"20\d\d-\d\d-\d\d"),
        StructuredOutputsParams(json=PERSON, disable_any_whitespace=True),
    ]
    params = [SamplingParams(temperature=0, max_tokens=60, structured_outputs=shape) for shape in shapes]
    outputs = llm.chat([asked(question) for question in questions], params, use_tqdm=False)
    for question, output in zip(questions, outputs):
        print(f"{question}\n  {output.outputs[0].text}")
    person = json.loads(outputs[-1].outputs[0].text)
    print("age next year:", person["age"] + 1)
