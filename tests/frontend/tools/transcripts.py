"""Assistant messages with tool calls, as the real chat templates of models write them."""

import functools
import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.frontend.chat import ChatTemplate
from quire.frontend.parse import Delta

TEMPLATES = Path(__file__).parents[2] / "data" / "templates"

ANY = {"type": "object", "properties": {}, "additionalProperties": True}
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "options": {
            "type": "object",
            "properties": {"unit": {"enum": ["C", "F"]}, "tags": {"type": "array", "items": {"type": "string"}}},
        },
    },
    "required": ["city"],
}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": f"{name}.", "parameters": parameters}}
    for name, parameters in {
        "get_weather": WEATHER,
        "get_weather_map": ANY,
        "now": {"type": "object", "properties": {}},
    }.items()
]

Call = tuple[str, dict[str, Any]]
ONE: list[Call] = [("get_weather", {"city": "Paris", "days": 3})]
TWO: list[Call] = [("get_weather", {"city": "Rome"}), ("now", {})]
NESTED: list[Call] = [
    (
        "get_weather_map",
        {"a": {"b": [1, -2.5e-3, [], {}, {"c": None}], "d": {"e": {"f": [True, False]}}}, "many": list(range(30))},
    )
]
UNICODE: list[Call] = [("get_weather", {"city": "Zürich 東京 🦙 é\u0301 \u200d", "options": {"tags": ["ß", "日本"]}})]
QUOTES: list[Call] = [
    (
        "get_weather",
        {"city": 'say "hi", it\'s C:\\temp\\new\\\\', "options": {"tags": ["'", '"', "\\", "\n\t", "\\n"]}},
    ),
    ("get_weather", {"city": '} ] ) ```\n```, {"a": 1}'}),
]
EMPTY: list[Call] = [("now", {})]
CASES = {"one": ONE, "two": TWO, "nested": NESTED, "unicode": UNICODE, "quotes": QUOTES, "empty": EMPTY}
PLAIN = tuple(CASES)


def as_json_list(calls: list[Call]) -> str:
    return json.dumps([{"name": name, "arguments": arguments} for name, arguments in calls], ensure_ascii=False)


def as_lines(calls: list[Call], line: str) -> str:
    return "".join(line.replace("{}", as_json_list([call])[1:-1]) for call in calls)


def as_python(calls: list[Call]) -> str:
    """Python's own writing of values."""
    return "[" + as_python_lines(calls).replace("\n", ", ") + "]"


def as_python_lines(calls: list[Call]) -> str:
    def as_call(name: str, arguments: dict[str, Any]) -> str:
        written = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        return f"{name}({written})"

    return "\n".join(as_call(*call) for call in calls)


@functools.cache
def compiled(template: str) -> ChatTemplate:
    return ChatTemplate((TEMPLATES / f"{template}.jinja").read_text(), bos_token="<s>", eos_token="</s>")


@dataclass(frozen=True)
class Source:
    """A template, and where the assistant's words stand in what it renders."""

    format: str
    template: str
    before: str  # the assistant's words come after its last occurrence
    after: str = ""  # and before this
    cases: tuple[str, ...] = PLAIN  # what the template can write
    spell: Callable[[list[Call]], str] | None = None  # the calls as content, for templates that write no calls
    kwargs: dict[str, Any] = field(default_factory=dict)

    def transcript(self, calls: list[Call], content: str = "") -> str:
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if self.spell is not None:
            message["content"] = content + self.spell(calls)
        else:
            functions = [{"name": name, "arguments": json.dumps(arguments)} for name, arguments in calls]
            message["tool_calls"] = [
                {"id": f"call{idx:05}", "type": "function", "function": function}
                for idx, function in enumerate(functions)
            ]
        text = compiled(self.template).render(
            [{"role": "user", "content": "Hi"}, message],
            add_generation_prompt=False,
            tools=TOOLS,
            template_kwargs=self.kwargs,
        )
        start = text.rindex(self.before) + len(self.before)
        return text[start : text.rindex(self.after)] if self.after else text[start:]


ONE_CALL = tuple(name for name in CASES if len(CASES[name]) == 1)
IM = {"before": "<|im_start|>assistant\n", "after": "<|im_end|>"}
LLAMA = {"before": "<|start_header_id|>assistant<|end_header_id|>\n\n", "after": "<|eot_id|>"}
PLAIN_TEXT = {"template": "google-gemma-2-2b-it", "before": "<start_of_turn>model\n", "after": "<end_of_turn>"}
SOURCES = [
    Source("hermes", "Qwen-Qwen3-0.6B", "</think>\n\n", "<|im_end|>"),
    Source("hermes", "Qwen-Qwen2.5-7B-Instruct", **IM),
    Source("hermes", "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use", "<|im_start|>assistant", "<|im_end|>"),
    Source("hermes", "ibm-granite-granite-4.0", "<|start_of_role|>assistant<|end_of_role|>", "<|end_of_text|>"),
    Source("llama3_json", "meta-llama-Llama-3.1-8B-Instruct", **LLAMA, cases=ONE_CALL),
    Source("llama3_json", "meta-llama-Llama-3.2-3B-Instruct", **LLAMA, cases=ONE_CALL),
    # This template writes strings between quotes without escaping what is in them.
    Source("llama_pythonic", "LFM2.5-8B-A1B", **IM, cases=tuple(name for name in CASES if name != "quotes")),
    Source("llama_pythonic", "meta-llama-Llama-3.2-3B-Instruct", **LLAMA, spell=as_python),
    Source("mistral", "mistralai-Mistral-Nemo-Instruct-2407", "[/INST]", "</s>"),
    Source("mistral", "Mistral-Small-3.2-24B-Instruct-2506", "[/INST]", "</s>"),
    Source("mistral", "mistralai-Ministral-3-14B-Reasoning-2512", "[/INST]", "</s>"),
    Source("deepseek_v31", "deepseek-ai-DeepSeek-V3.1", "</think>", "<｜end▁of▁sentence｜>"),
    Source(
        "deepseek_v3", "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", "Hi<｜Assistant｜>", "<｜end▁of▁sentence｜><｜Ass"
    ),
    Source("harmony", "openai-gpt-oss-120b", "<|start|>assistant", cases=ONE_CALL),
    Source("qwen3_coder", "Qwen3-Coder", "<|im_start|>assistant", "<|im_end|>"),
    Source("qwen3_coder", "Qwen3.5-4B", "</think>\n\n", "<|im_end|>"),
    Source("qwen3_coder", "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "</think>", "<|im_end|>"),
    Source("qwen3_coder", "StepFun3.5-Flash", "</think>", "<|im_end|>"),
    Source("seed_oss", "ByteDance-Seed-OSS", "<seed:bos>assistant", "<seed:eos>"),
    Source("minimax_m2", "MiniMax-M2", "]~b]ai\n", "[e~["),
    Source("hy_v3", "tencent-Hy3", "</think:opensource>", "<｜hy_eos:opensource｜>"),
    Source("kimi_k2", "moonshotai-Kimi-K2", "<|im_assistant|>assistant<|im_middle|>", "<|im_end|>"),
    Source("gemma4", "google-gemma-4-31B-it", "<|turn>model\n", "<|tool_response>"),
    Source("glm4", "GLM-4.6", "</think>"),
    Source("glm4", "GLM-4.7-Flash", "</think>"),
    Source(
        "granite",
        "ibm-granite-granite-3.3-2B-Instruct",
        "assistant<|end_of_role|>",
        "<|end_of_text|>",
        spell=lambda calls: "<|tool_call|>" + as_json_list(calls),
    ),
    Source(
        "phi4",
        "fireworks-ai-llama-3-firefunction-v2",
        "Hi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        "<|eot_id|>",
        kwargs={"functions": "[]", "datetime": "now"},
    ),
    Source(
        "phi4",
        "microsoft-Phi-4-mini-instruct",
        "<|assistant|>",
        "<|end|>",
        spell=lambda calls: f"<|tool_call|>{as_json_list(calls)}<|/tool_call|>",
    ),
    Source("generic_json", "MiniMax-M1", "ai name=assistant\n", "<end_of_sentence>"),
    Source("generic_json", "NVIDIA-Nemotron-Nano-v2", "Assistant\n", "<SPECIAL_12>"),
    Source("generic_json", **PLAIN_TEXT, spell=as_json_list),
    # Formats of which no real template is at hand.
    Source("xlam", **PLAIN_TEXT, spell=as_json_list),
    Source("xlam", **PLAIN_TEXT, spell=lambda calls: f"```json\n{as_json_list(calls)}\n```"),
    Source("xlam", **PLAIN_TEXT, spell=lambda calls: f"[TOOL_CALLS]{as_json_list(calls)}"),
    Source("xlam", **PLAIN_TEXT, spell=lambda calls: f"<tool_call>{as_json_list(calls)}</tool_call>"),
    Source("hunyuan", **PLAIN_TEXT, spell=lambda calls: f"<tool_calls>{as_json_list(calls)}</tool_calls>"),
    Source("ernie45", **PLAIN_TEXT, spell=lambda calls: as_lines(calls, "<tool_call>\n{}\n</tool_call>\n")),
    Source("longcat", **PLAIN_TEXT, spell=lambda calls: as_lines(calls, "<longcat_tool_call>{}</longcat_tool_call>\n")),
    Source("olmo3", **PLAIN_TEXT, spell=lambda calls: f"<function_calls>\n{as_python_lines(calls)}\n</function_calls>"),
]


def gathered(deltas: list[Delta]) -> tuple[str, str, list[tuple[str, str]]]:
    """As a client adds deltas up: content, reasoning, and name and arguments of each call."""
    calls: list[list[str]] = []
    for call in itertools.chain.from_iterable(delta.calls for delta in deltas):
        if call.name is not None:
            assert call.index == len(calls) and call.arguments == ""
            calls.append([call.name, ""])
        else:
            assert call.index == len(calls) - 1
            calls[call.index][1] += call.arguments
    content = "".join(delta.content for delta in deltas)
    reasoning = "".join(delta.reasoning for delta in deltas)
    return content, reasoning, [(name, arguments) for name, arguments in calls]


def parsed(parser, pieces: list[str] | str) -> tuple[str, str, list[tuple[str, str]]]:
    pieces = [pieces] if isinstance(pieces, str) else pieces
    return gathered([*map(parser.feed, pieces), parser.finish()])


def cut(text: str, positions: list[int]) -> list[str]:
    places = [0, *sorted(position % (len(text) + 1) for position in positions), len(text)]
    return [text[start:end] for start, end in zip(places, places[1:])]
