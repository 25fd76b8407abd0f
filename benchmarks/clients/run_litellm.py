"""Drives litellm, which sends a program's calls to many kinds of servers: all kinds that we are. See `clients.py`.

Its fallback to a model with a longer context goes by the words of the error, which is why ours are OpenAI's.
"""

import asyncio
import gc
import json
from collections.abc import Callable
from typing import Any

import driver
import litellm
from driver import Server, Setting, check, expect, expect_raises
from pydantic import BaseModel, Field

MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
OPENAI = ("openai", "hosted_vllm")
PROVIDERS = (*OPENAI, "anthropic")


class City(BaseModel, extra="forbid"):
    name: str = Field(max_length=20)
    population: int = Field(ge=0, le=100_000_000)


def options(server: Server, provider: str) -> dict[str, Any]:
    return {
        "model": f"{provider}/{server.model}",
        "api_base": server.url if provider == "anthropic" else server.base_url,
        "api_key": server.api_key,
        "max_tokens": 60,
        "temperature": 0,
        "timeout": 120,
        "num_retries": 0,
    }


def check_each(name: str, providers: tuple[str, ...] = PROVIDERS) -> Callable[[Callable[[Setting, str], None]], None]:
    """A check for every provider."""

    def add(function: Callable[[Setting, str], None]) -> None:
        for provider in providers:
            check(f"{provider}/ {name}")(lambda setting, provider=provider: function(setting, provider))

    return add


def text_of(chunks: list[Any]) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


@check_each("chat")
def chat(setting: Setting, provider: str) -> None:
    answer = litellm.completion(messages=MESSAGES, **options(setting.long, provider))
    expect("Paris" in answer.choices[0].message.content, answer)
    expect(answer.choices[0].finish_reason == "stop", answer)
    usage = answer.usage
    expect(usage.prompt_tokens > 0 and usage.total_tokens == usage.prompt_tokens + usage.completion_tokens, usage)


@check_each("chat without a key, several answers, logprobs", OPENAI)
def chat_options(setting: Setting, provider: str) -> None:
    asked = {**options(setting.short, provider), "n": 2, "logprobs": True, "top_logprobs": 2, "temperature": 1}
    answer = litellm.completion(messages=MESSAGES, seed=1, stop=["\n\n"], **asked)
    expect(len(answer.choices) == 2, answer)
    expect(len(answer.choices[0].logprobs.content[0].top_logprobs) == 2, answer.choices[0])


@check_each("chat, streaming, with usage")
def stream(setting: Setting, provider: str) -> None:
    chunks = list(
        litellm.completion(
            messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **options(setting.long, provider)
        )
    )
    whole = litellm.completion(messages=MESSAGES, **options(setting.long, provider))
    expect(text_of(chunks) == whole.choices[0].message.content, text_of(chunks))
    usage = [chunk.usage for chunk in chunks if getattr(chunk, "usage", None)]
    expect(usage and usage[-1].completion_tokens == whole.usage.completion_tokens, usage)
    built = litellm.stream_chunk_builder(chunks, messages=MESSAGES)
    expect(built.choices[0].finish_reason == "stop", built)


@check_each("chat, asynchronous, eight at once")
def at_once(setting: Setting, provider: str) -> None:
    async def ask() -> list[Any]:
        calls = [litellm.acompletion(messages=MESSAGES, **options(setting.long, provider)) for _ in range(8)]
        return await asyncio.gather(*calls)

    answers = asyncio.run(ask())
    expect(all("Paris" in answer.choices[0].message.content for answer in answers), answers[0])


@check_each("completion of a text", OPENAI)
def text(setting: Setting, provider: str) -> None:
    answer = litellm.text_completion(prompt="The capital of France is", **options(setting.long, provider))
    expect("Paris" in answer.choices[0].text, answer)


@check_each("tools: a call that is asked for, streamed alike")
def tools(setting: Setting, provider: str) -> None:
    named = {"type": "function", "function": {"name": "get_weather"}}
    messages = [{"role": "user", "content": "What is the weather in Paris?"}]
    asked = {"messages": messages, "tools": [WEATHER], "tool_choice": named, **options(setting.long, provider)}
    (call,) = litellm.completion(**asked).choices[0].message.tool_calls
    expect(call.function.name == "get_weather" and set(json.loads(call.function.arguments)) == {"city"}, call)
    built = litellm.stream_chunk_builder(list(litellm.completion(stream=True, **asked)), messages=messages)
    (streamed,) = built.choices[0].message.tool_calls
    expect(json.loads(streamed.function.arguments) == json.loads(call.function.arguments), streamed)


@check_each("tools: an answer after a call's result")
def tool_result(setting: Setting, provider: str) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
    messages = [
        {"role": "user", "content": "What is the weather in Paris?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "12 degrees, rain"},
    ]
    answer = litellm.completion(messages=messages, tools=[WEATHER], **options(setting.long, provider))
    expect(answer.choices[0].message.content, answer)


@check_each("JSON of a pydantic model, and any JSON object")
def json_answers(setting: Setting, provider: str) -> None:
    messages = [{"role": "user", "content": "Describe Paris as JSON with name and population."}]
    asked = {"messages": messages, **options(setting.long, provider), "max_tokens": 300}
    City.model_validate_json(litellm.completion(response_format=City, **asked).choices[0].message.content)
    if provider == "anthropic":  # whose protocol has no such format: it is not sent
        return
    answer = litellm.completion(response_format={"type": "json_object"}, **asked).choices[0].message.content
    expect(isinstance(json.loads(answer), dict), answer)


@check_each("a prompt longer than the context: ContextWindowExceededError")
def too_long(setting: Setting, provider: str) -> None:
    asked = {**options(setting.short, provider), "messages": [{"role": "user", "content": setting.short.too_long}]}
    expect_raises(litellm.ContextWindowExceededError, lambda: litellm.completion(**asked))
    expect_raises(litellm.ContextWindowExceededError, lambda: list(litellm.completion(stream=True, **asked)))
    expect_raises(litellm.ContextWindowExceededError, lambda: asyncio.run(litellm.acompletion(**asked)))
    more = {**options(setting.short, provider), "messages": MESSAGES, "max_tokens": setting.short.max_model_len}
    if provider == "anthropic":  # such an answer is cut
        expect("Paris" in litellm.completion(**more).choices[0].message.content, more)
        return
    expect_raises(litellm.ContextWindowExceededError, lambda: litellm.completion(**more))


@check_each("its fallback to a model with a longer context")
def fallback(setting: Setting, provider: str) -> None:
    names = {"short": setting.short, "long": setting.long}
    models = [{"model_name": name, "litellm_params": options(server, provider)} for name, server in names.items()]
    router = litellm.Router(model_list=models, context_window_fallbacks=[{"short": ["long"]}], num_retries=0)
    messages = [{"role": "user", "content": setting.short.too_long}]
    answer = router.completion("short", messages)
    expect(answer.model.endswith(setting.long.model), answer.model)
    expect(answer.usage.prompt_tokens > setting.short.max_model_len, answer.usage)
    text = text_of(list(router.completion("short", messages, stream=True)))
    expect(text == (answer.choices[0].message.content or ""), text)
    expect(router.completion("short", MESSAGES).model.endswith(setting.short.model), "the wrong model")


@check_each("a wrong key, a wrong model, a wrong value: the right errors")
def errors(setting: Setting, provider: str) -> None:
    right = {**options(setting.long, provider), "messages": MESSAGES}
    wrong = {
        litellm.AuthenticationError: {"api_key": "wrong"},
        litellm.NotFoundError: {"model": f"{provider}/other"},
        litellm.BadRequestError: {"temperature": -1},
    }
    for kind, change in wrong.items():
        expect_raises(kind, lambda change=change: litellm.completion(**{**right, **change}))


@check("openai/ lists the models")
def models(setting: Setting) -> None:
    found = litellm.get_valid_models(
        check_provider_endpoint=True,
        custom_llm_provider="openai",
        api_base=setting.long.base_url,
        api_key=setting.long.api_key,
    )
    expect(any(name.endswith(setting.long.model) for name in found), found)


litellm.suppress_debug_info = True
# It leaves streams for the collector, which closes them: inside a lock that closing takes, this waits for itself.
gc.disable()
driver.main("litellm")
