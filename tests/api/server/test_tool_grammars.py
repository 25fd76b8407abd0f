"""Tools as programs really declare them make a grammar in every format, or are refused in a sentence."""

import json
from typing import Literal

import msgspec
import pydantic
import pytest

from quire import registry
from quire.api.server.shape import ChatFields, chat_constraint
from quire.config import EngineConfig
from quire.errors import RequestError
from quire.frontend.model import ModelInfo
from quire.structured.engines.xgrammar import XGrammar
from quire.structured.spec import GrammarSpec

FORMATS = registry.names("quire.frontend.tools")


class Span(pydantic.BaseModel):
    start: int = pydantic.Field(ge=0)
    end: int | None = None


class Edit(pydantic.BaseModel):
    """As agents declare them: optional values, lists, nested models, lengths."""

    path: str = pydantic.Field(min_length=1, max_length=40, description="Where.")
    text: str | None = None
    mode: Literal["append", "replace"] = "append"
    names: str | list[str] = ""
    spans: list[Span] = []
    where: Span | None = None
    share: float | str = 0


def shape(tiny_llama, name: str, count: int, **options):
    config = EngineConfig.from_kwargs(model=str(tiny_llama), skip_tokenizer_init=True, tool_call_parser=name)
    schema = options.pop("schema", None) or Edit.model_json_schema()
    functions = [{"name": f"edit_{idx}", "parameters": schema} for idx in range(count)]
    if options.pop("strict", False):
        functions = [{**function, "strict": True} for function in functions]
    tools = [{"type": "function", "function": function} for function in functions]
    asked = msgspec.convert({"tools": tools, **options}, ChatFields)
    return chat_constraint(asked, ModelInfo.open(config))


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("name", FORMATS)
def test_tools_of_real_programs_make_a_grammar(tiny_llama, name: str, choice: str) -> None:
    constraint = shape(tiny_llama, name, 3, tool_choice=choice).structured
    assert constraint is not None
    XGrammar.lower(GrammarSpec("structural_tag", json.dumps(constraint.structural_tag)))


@pytest.mark.parametrize("name", FORMATS)
def test_with_very_many_tools_the_model_is_free_unless_it_must_be_exact(tiny_llama, name: str) -> None:
    assert len(shape(tiny_llama, name, 90, tool_choice="auto").tools) == 90
    for options in ({"strict": True}, {"tool_choice": "required"}):
        try:
            assert shape(tiny_llama, name, 90, **options).structured is not None
        except RequestError as error:
            assert "tools" in str(error)


@pytest.mark.parametrize("schema", [{"properties": 5}, {"required": "x"}, {"required": [1]}, {"properties": [1]}])
@pytest.mark.parametrize("name", ["qwen3_coder", "glm4", "llama_pythonic", "olmo3"])
def test_what_is_no_schema_is_refused_in_a_sentence(tiny_llama, name: str, schema: dict) -> None:
    with pytest.raises(RequestError, match="edit_0"):
        shape(tiny_llama, name, 1, schema={"type": "object", **schema})
