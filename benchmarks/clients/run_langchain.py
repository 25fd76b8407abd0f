"""Drives langchain-openai's chat model: answers, streams, batches, tools and answers with a shape. See `clients.py`."""

import asyncio
from typing import Any

import driver
import openai
from driver import Server, Setting, check, expect, expect_raises
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessageChunk, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field

loop = asyncio.Runner()  # one for all: chat models with the same address share connections, which belong to a loop
QUESTION = "What is the capital of France?"
SHAPED = "Describe Paris as JSON with name and population."


class City(BaseModel):
    """A city."""

    name: str = Field(max_length=20)
    population: int = Field(ge=0, le=100_000_000)


@tool
def get_weather(city: str) -> str:
    """The weather in a city."""
    return f"12 degrees in {city}"


def model(server: Server, **options: Any) -> ChatOpenAI:
    defaults = {"temperature": 0, "max_tokens": 100, "max_retries": 0, "timeout": 120}
    return ChatOpenAI(model=server.model, base_url=server.base_url, api_key=server.api_key, **{**defaults, **options})


@check("invoke, with usage")
def invoke(setting: Setting) -> None:
    answer = model(setting.long).invoke([SystemMessage("Answer in one sentence."), HumanMessage(QUESTION)])
    expect("Paris" in answer.content, answer)
    usage = answer.usage_metadata
    expect(usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"] > 0, usage)
    expect(answer.response_metadata["finish_reason"] == "stop", answer.response_metadata)


@check("invoke without a key, with logprobs and a stop string")
def invoke_options(setting: Setting) -> None:
    answer = model(setting.short, logprobs=True, top_logprobs=2, stop=["France"], seed=1).invoke(QUESTION)
    expect("France" not in answer.content, answer.content)
    expect(len(answer.response_metadata["logprobs"]["content"][0]["top_logprobs"]) == 2, answer.response_metadata)


@check("stream, with usage")
def stream(setting: Setting) -> None:
    whole = model(setting.long).invoke(QUESTION)
    chunks = list(model(setting.long, stream_usage=True).stream(QUESTION))
    streamed = sum(chunks[1:], start=chunks[0])
    expect(len(chunks) > 3 and streamed.content == whole.content, streamed)
    expect(streamed.usage_metadata["output_tokens"] == whole.usage_metadata["output_tokens"], streamed)


@check("astream")
def astream(setting: Setting) -> None:
    async def ask() -> list[AIMessageChunk]:
        return [chunk async for chunk in model(setting.long).astream(QUESTION)]

    text = "".join(chunk.content for chunk in loop.run(ask()))
    expect("Paris" in text, text)


@check("batch of eight, and abatch")
def batch(setting: Setting) -> None:
    questions = [QUESTION] * 8
    answers = model(setting.long).batch(questions, config={"max_concurrency": 4})
    answers += loop.run(model(setting.long).abatch(questions))
    expect(len(answers) == 16 and all("Paris" in answer.content for answer in answers), answers[0])


@check("with_structured_output: json_schema, strict and not")
def json_schema(setting: Setting) -> None:
    for strict in (True, None):
        shaped = model(setting.long).with_structured_output(City, method="json_schema", strict=strict)
        expect(isinstance(found := shaped.invoke(SHAPED), City), found)
    raw = model(setting.long).with_structured_output(City, method="json_schema", include_raw=True).invoke(SHAPED)
    expect(raw["parsing_error"] is None and raw["raw"].usage_metadata, raw)


@check("with_structured_output: json_schema, streaming")
def json_schema_stream(setting: Setting) -> None:
    shaped = model(setting.long).with_structured_output(City, method="json_schema")
    *_, last = shaped.stream(SHAPED)
    expect(last == shaped.invoke(SHAPED), last)


@check("with_structured_output: function_calling, json_mode")
def other_shapes(setting: Setting) -> None:
    found = model(setting.long).with_structured_output(City, method="function_calling").invoke(SHAPED)
    expect(isinstance(found, City), found)
    found = model(setting.long, max_tokens=300).with_structured_output(None, method="json_mode").invoke(SHAPED)
    expect(isinstance(found, dict), found)


@check("bind_tools: a tool by name, any tool, streamed")
def tools(setting: Setting) -> None:
    question = "What is the weather in Paris?"
    for choice in ("get_weather", "any", "required", True):
        bound = model(setting.long).bind_tools([get_weather], tool_choice=choice, parallel_tool_calls=False)
        answer = bound.invoke(question)
        (call,) = answer.tool_calls
        expect(call["name"] == "get_weather" and isinstance(call["args"]["city"], str) and call["id"], answer)
    first, *others = bound.stream(question)
    expect(sum(others, start=first).tool_calls[0]["args"] == call["args"], others)


@check("bind_tools: left to the model, strict, and after a tool's result")
def tool_results(setting: Setting) -> None:
    question = HumanMessage("What is the weather in Paris?")
    llm = model(setting.long)
    calling = llm.bind_tools([get_weather], tool_choice="get_weather", strict=True).invoke([question])
    result = ToolMessage("12 degrees, rain", tool_call_id=calling.tool_calls[0]["id"])
    answer = llm.bind_tools([get_weather]).invoke([question, calling, result])
    expect(answer.content or answer.tool_calls, answer)


@check("OpenAI: completion of a text")
def completion(setting: Setting) -> None:
    server = setting.long
    llm = OpenAI(model=server.model, base_url=server.base_url, api_key=server.api_key, temperature=0, max_tokens=20)
    expect("Paris" in (text := llm.invoke("The capital of France is")), text)
    expect("".join(llm.stream("The capital of France is")) == text, text)


@check("a prompt longer than the context: ContextOverflowError")
def too_long(setting: Setting) -> None:
    expect_raises(ContextOverflowError, lambda: model(setting.short).invoke(setting.short.too_long))
    expect_raises(ContextOverflowError, lambda: list(model(setting.short).stream(setting.short.too_long)))


@check("with_fallbacks to a model with a longer context")
def fallback(setting: Setting) -> None:
    both = model(setting.short).with_fallbacks([model(setting.long)], exceptions_to_handle=(ContextOverflowError,))
    answer = both.invoke(setting.short.too_long)
    expect(answer.response_metadata["model_name"] == setting.long.model, answer.response_metadata)


@check("a wrong key, a wrong model, a wrong value: the right errors")
def errors(setting: Setting) -> None:
    wrong = {
        openai.AuthenticationError: {"api_key": "wrong"},
        openai.NotFoundError: {"model": "other"},
        openai.BadRequestError: {"temperature": -1},
    }
    for kind, change in wrong.items():
        server = setting.long
        right = {"model": server.model, "base_url": server.base_url, "api_key": server.api_key, "max_retries": 0}
        expect_raises(kind, lambda right=right, change=change: ChatOpenAI(**{**right, **change}).invoke(QUESTION))


driver.main("langchain-openai")
