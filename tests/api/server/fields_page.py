"""`python -m tests.api.server.fields_page`: writes the tables of docs/api.md from the server's table of endpoints.

What a field takes comes from the OpenAPI document, what it is for from the comment behind its declaration.
"""

import ast
import inspect
import re
from pathlib import Path
from typing import Any

import msgspec

from quire.api.server import openapi
from quire.api.server.app import ENDPOINTS, Endpoint
from quire.api.server.fields import RequestBody, SamplingFields

PAGE = Path(__file__).parents[3] / "docs" / "api.md"
START, END = "<!-- written by tests/api/server/fields_page.py: from here -->", "<!-- to here -->"
KEYS = {
    "open": "none",
    "user": "a user's",
    "admin": "the operator's",
    "watch": "the operator's, where there are keys",
}
HUGE = 2**53  # larger bounds are only those of the machine


def main() -> None:
    PAGE.write_text(page())


def page() -> str:
    """The page as it should be."""
    before, _, rest = PAGE.read_text().partition(START)
    return f"{before}{START}\n\n{tables()}\n\n{END}{rest.partition(END)[2]}"


def tables() -> str:
    schemas = openapi.build(ENDPOINTS)["components"]["schemas"]
    parts = ["## Endpoints", "", *rows(["path", "key", "what it does"], map(endpoint_row, ENDPOINTS))]
    bodies: dict[type[RequestBody], list[Endpoint]] = {}
    for endpoint in ENDPOINTS:
        if endpoint.body is not None:
            bodies.setdefault(endpoint.body, []).append(endpoint)
    shared = list(field_rows(SamplingFields, schemas["CompletionRequest"]))
    parts += ["", "## What chat and completions have in common", "", *rows(["field", "takes", ""], shared)]
    nested: dict[str, type[msgspec.Struct]] = {}
    for body, endpoints in bodies.items():
        parts += ["", f"## {', '.join(f'`{endpoint.path}`' for endpoint in endpoints)}", ""]
        if body.__doc__:
            parts += [" ".join(body.__doc__.split()), ""]
        above = shared if issubclass(body, SamplingFields) else []
        own = [row for row in field_rows(body, schemas[body.__name__]) if row not in above]
        parts += rows(["field", "takes", ""], own)
        for kind in structs_in(body):
            nested[kind.__name__] = kind
        parts += lists(body)
    for name, kind in sorted(nested.items()):
        parts += ["", f"### {name}", "", *rows(["field", "takes", ""], field_rows(kind, schemas[name]))]
    for endpoint in ENDPOINTS:
        if endpoint.query is not None:
            (fields,) = msgspec.json.schema(endpoint.query)["$defs"].values()
            parts += ["", f"## The query string of `{endpoint.path}`", ""]
            parts += rows(["name", "takes", ""], rows_of(fields["properties"], comments(endpoint.query)))
    return "\n".join(parts)


def endpoint_row(endpoint: Endpoint) -> list[str]:
    return [f"`{endpoint.method} {endpoint.path}`", KEYS[endpoint.policy], endpoint.summary]


def field_rows(kind: type[msgspec.Struct], schema: dict[str, Any]) -> list[list[str]]:
    own = {name: schema["properties"][name] for name in kind.__struct_fields__}
    return rows_of(own, comments(kind))


def rows_of(properties: dict[str, Any], notes: dict[str, str]) -> list[list[str]]:
    return [[f"`{name}`", takes(schema), notes.get(name, "")] for name, schema in properties.items()]


def lists(body: type[RequestBody]) -> list[str]:
    """The fields that are no fields of the struct."""
    ignored = sorted(body.no_effect - set(body.__struct_fields__))
    parts = ["", f"Accepted, without effect: {', '.join(f'`{name}`' for name in ignored)}."]
    if body.refused:
        parts += ["", f"Refused with 400: {', '.join(f'`{name}`' for name in sorted(body.refused))}."]
    return parts


def rows(header: list[str], cells: Any) -> list[str]:
    lines = [header, ["---"] * len(header), *cells]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]


def structs_in(kind: Any) -> list[type[msgspec.Struct]]:
    """The structs that a struct's fields hold, and those that these hold."""
    found: list[type[msgspec.Struct]] = []

    def look(hint: Any) -> None:
        if isinstance(hint, msgspec.inspect.StructType):
            if hint.cls is not kind and hint.cls not in found:
                found.append(hint.cls)
            for field in hint.fields:
                look(field.type)
        for name in ("types", "item_type", "value_type", "type"):
            inner = getattr(hint, name, ())
            for each in inner if isinstance(inner, tuple) else (inner,):
                if isinstance(each, msgspec.inspect.Type):
                    look(each)

    look(msgspec.inspect.type_info(kind))
    return found


def comments(kind: type) -> dict[str, str]:
    """What stands behind the declaration of each field, its bases' included."""
    found: dict[str, str] = {}
    for declaring in reversed(kind.__mro__):
        if not issubclass(declaring, msgspec.Struct) or declaring is msgspec.Struct:
            continue
        lines = inspect.getsource(declaring).splitlines()
        for node in ast.parse("\n".join(lines)).body[0].body:  # type: ignore[attr-defined]
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                comment = re.search(r"  # (.*)$", lines[(node.end_lineno or 1) - 1])
                found[node.target.id] = comment[1] if comment else ""
    return found


def takes(schema: dict[str, Any]) -> str:
    """A field's type and bounds in a few words; null, which every optional field takes, is left out."""
    if "anyOf" in schema:
        return " or ".join(takes(option) for option in schema["anyOf"] if option.get("type") != "null")
    if "$ref" in schema:
        return schema["$ref"].rpartition("/")[2]
    if "enum" in schema:
        return ", ".join(str(value) for value in schema["enum"])
    match schema.get("type"):
        case "integer":
            return "whole number" + between(schema)
        case "number":
            return "number" + between(schema)
        case "string":
            return "text" + at_most(schema, "maxLength", "characters")
        case "array":
            return f"list of {takes(schema.get('items', {}))}" + at_most(schema, "maxItems", "entries")
        case "object":
            return "object" + at_most(schema, "maxProperties", "members")
        case "boolean":
            return "true or false"
    return "anything"


def between(schema: dict[str, Any]) -> str:
    low, high = schema.get("minimum"), schema.get("maximum")
    parts = [f"from {low:,}" if low is not None and abs(low) < HUGE else ""]
    parts += [f"up to {high:,}" if high is not None and abs(high) < HUGE else ""]
    return "".join(f" {part}" for part in parts if part)


def at_most(schema: dict[str, Any], bound: str, what: str) -> str:
    return f" (up to {schema[bound]:,} {what})" if bound in schema else ""


if __name__ == "__main__":
    main()
