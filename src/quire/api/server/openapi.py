"""/openapi.json and /docs: the table of endpoints and the structs of their bodies, for programs and for people.

Built once by `app.py` from its table. The page has no scripts and loads nothing from other servers, which could read
the keys that are typed into the same browser.
"""

import html
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from quire import __version__
from quire.api.server.calls import Answer, Call
from quire.api.server.fields import MAX_NAME_CHARS
from quire.api.server.prompts import TextPart

if TYPE_CHECKING:
    from quire.api.server.app import Endpoint

REF = "#/components/schemas/{name}"
ERRORS = {
    "400": "The request is wrong; the message says how",
    "401": "A key is missing or wrong",
    "403": "This path is for operators, and the server has no operator's key; or it is called by a foreign name",
    "404": "There is no such path or model",
    "408": "The request's own time limit passed",
    "413": "The body is too large",
    "415": "The body is not called JSON",
    "429": "The key has had its requests or tokens of this minute: come back later",
    "431": "The headers are too large",
    "500": "The engine failed on this request",
    "503": "Too many requests are waiting, or the engine is starting: come back later",
}


def build(endpoints: Sequence["Endpoint"]) -> dict[str, Any]:
    """The OpenAPI 3.1 document."""
    found: list[Any] = [TextPart, *(endpoint.errors for endpoint in endpoints)]
    for endpoint in endpoints:
        found += [kind for kind in (endpoint.body, endpoint.answer) if kind is not None and not isinstance(kind, str)]
    kinds = sorted(set(found), key=str)
    references, components = msgspec.json.schema_components(kinds, ref_template=REF)
    schema_of: dict[Any, Any] = dict(zip(kinds, references))
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = _operation(endpoint, schema_of)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Quire",
            "version": __version__,
            "description": "An OpenAI-compatible server for one language model.",
        },
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer", "description": "A key given with --api-key"}
            },
        },
    }


def _operation(endpoint: "Endpoint", schema_of: dict[Any, Any]) -> dict[str, Any]:
    if isinstance(endpoint.answer, str):
        content: dict[str, Any] = {endpoint.answer: {}}
    else:
        content = {"application/json": {"schema": schema_of[endpoint.answer]}}
    if endpoint.streams:
        content[endpoint.stream_type] = {}
    failed = {"application/json": {"schema": schema_of[endpoint.errors]}}
    errors = {code: {"description": text, "content": failed} for code, text in ERRORS.items()}
    is_open = endpoint.policy == "open"
    name = endpoint.handler.__name__
    operation: dict[str, Any] = {
        # Open endpoints share handlers.
        "operationId": f"{name}_{endpoint.path[1:]}_{endpoint.method.lower()}" if is_open else name,
        "summary": endpoint.summary,
        "responses": {"200": {"description": endpoint.summary, "content": content}, **errors},
        "security": [] if is_open else [{"key": []}],
    }
    if endpoint.body is not None:
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schema_of[endpoint.body]}},
        }
    if names := re.findall(r"{(\w+)}", endpoint.path):
        schema = {"type": "string", "maxLength": MAX_NAME_CHARS}
        operation["parameters"] = [{"name": name, "in": "path", "required": True, "schema": schema} for name in names]
    if endpoint.query is not None:
        (fields,) = msgspec.json.schema(endpoint.query)["$defs"].values()
        operation["parameters"] = [
            {"name": name, "in": "query", "required": False, "schema": schema}
            for name, schema in fields["properties"].items()
        ]
    return operation


async def document(call: Call) -> Answer:
    return Answer.json(call.service.openapi)


async def page(call: Call) -> Answer:
    return Answer(_page(call.service.openapi).encode(), content_type=b"text/html; charset=utf-8")


STYLE = """body{font:16px/1.5 system-ui,sans-serif;max-width:52rem;margin:2rem auto;padding:0 1rem;color:#222}
summary{cursor:pointer;padding:.3rem 0}code{font:14px ui-monospace,monospace}b{display:inline-block;width:3.5rem}
table{border-collapse:collapse;margin:.3rem 0 1rem 1.2rem}td{padding:.1rem .8rem .1rem 0;vertical-align:top}"""


def _page(document: dict[str, Any]) -> str:
    schemas = document["components"]["schemas"]
    parts = []
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            title = f"<b>{method.upper()}</b> <code>{html.escape(path)}</code> {html.escape(operation['summary'])}"
            body = operation.get("requestBody")
            if body is None:
                parts.append(f"<p>{title}</p>")
                continue
            schema = schemas[body["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]]
            rows = "".join(
                f"<tr><td><code>{html.escape(name)}</code></td><td>{html.escape(_type(field))}</td></tr>"
                for name, field in schema["properties"].items()
            )
            parts.append(f"<details><summary>{title}</summary><table>{rows}</table></details>")
    info = document["info"]
    title = f"{info['title']} {info['version']}"
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>'
        f'<h1>{title}</h1><p>{info["description"]} The same for programs: <a href="openapi.json">openapi.json</a>.</p>'
        + "".join(parts)
    )


def _type(field: dict[str, Any]) -> str:
    """A field's type in a few words; null is left out, because every optional field may be null."""
    if "anyOf" in field:
        return " or ".join(_type(option) for option in field["anyOf"] if option.get("type") != "null")
    if "$ref" in field:
        return field["$ref"].rpartition("/")[2]
    if field.get("type") == "array":
        return f"list of {_type(field.get('items', {}))}"
    return str(field.get("type", "any"))
