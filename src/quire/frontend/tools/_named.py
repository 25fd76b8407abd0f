"""The grammar of arguments that are written one by one with their names, where a call is no JSON object.

Used by the pythonic formats and by those with tags around each argument: they say how one argument is written. A schema
that cannot be honoured is refused where a call is required or the tool strict, else its arguments are free.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.errors import RequestError
from quire.frontend.tools import base

# Root keywords of a schema that a list of named arguments cannot honour.
_UNSUPPORTED = tuple(
    """
    $ref allOf anyOf oneOf not if patternProperties propertyNames minProperties maxProperties
    dependentRequired dependentSchemas dependencies const enum unevaluatedProperties
    """.split()
)
_MAX_SHARED_CHARS = 100_000  # of definitions, which go with each argument that refers to them
_OTHER_REFERENCE = re.compile(r'"\$ref": "(?!#/(?:\$defs|definitions)/)')


@dataclass(frozen=True)
class Arguments:
    properties: Mapping[str, Any]  # schemas that stand for themselves, in the order of the tool's schema
    required: tuple[str, ...]
    others: Any  # the schema of arguments that have any name; None: there are no others


def arguments_of(tool: base.Tool, required: bool, names: re.Pattern[str]) -> Arguments:
    """`names`: what an argument may be called in this format.

    Only properties that the schema names are written, or any where it names none.
    """
    function, schema = tool["function"], base.schema_of(tool)
    _check(function["name"], schema)
    if (trouble := _trouble(schema, names)) is not None:
        if required or function.get("strict"):
            name = function["name"]
            raise RequestError(
                f"the parameters of the tool {name} have {trouble}, which calls of this model cannot honour.", "tools"
            )
        schema = {}
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}

    def alone(argument: Any) -> Any:
        return {**argument, **shared} if _refers(argument) else argument

    others = schema.get("additionalProperties", True)
    needed = tuple(schema.get("required") or ())
    properties = dict.fromkeys(needed, others) | (schema.get("properties") or {})
    in_order = dict.fromkeys([*(schema.get("properties") or ()), *needed])
    takes_others = not properties and others is not False
    return Arguments({key: alone(properties[key]) for key in in_order}, needed, alone(others) if takes_others else None)


def _refers(argument: Any) -> bool:
    return isinstance(argument, dict) and '"$ref"' in json.dumps(argument)


def _check(name: str, schema: dict[str, Any]) -> None:
    properties, required = schema.get("properties") or {}, schema.get("required") or []
    is_list = isinstance(required, list) and all(isinstance(key, str) for key in required)
    if not isinstance(properties, dict) or not is_list:
        raise RequestError(
            f"the parameters of the tool {name} are no JSON schema: properties is an object, required a list of names.",
            "tools",
        )


def _trouble(schema: dict[str, Any], names: re.Pattern[str]) -> str | None:
    """What named arguments cannot honour."""
    for keyword in _UNSUPPORTED:
        if keyword in schema:
            return keyword
    if _OTHER_REFERENCE.search(json.dumps(schema)):
        return "a $ref to other places than $defs"
    shared = json.dumps([schema.get("$defs"), schema.get("definitions")])
    if len(shared) * sum(map(_refers, (schema.get("properties") or {}).values())) > _MAX_SHARED_CHARS:
        return "long definitions to which many arguments refer"
    keys = [*(schema.get("properties") or ()), *(schema.get("required") or ())]
    return next((f"the name {key!r:.80}" for key in keys if not names.fullmatch(key)), None)
