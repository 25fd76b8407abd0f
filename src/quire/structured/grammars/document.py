"""A JSON schema as a document: its subschemas, and where every `$ref` in it leads. Nothing is ever fetched.

Used by the schema compiler. Knows where schemas sit inside schemas and how they are addressed; must not know what the
keywords mean.
"""

import json
from decimal import Decimal
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from quire.errors import RequestError

# Keywords that hold a schema, a list of schemas, or named schemas.
_ONE = {"additionalItems", "additionalProperties", "contains", "else", "if", "items", "not", "propertyNames", "then"}
_ONE |= {"unevaluatedItems", "unevaluatedProperties", "contentSchema"}
_LIST = {"allOf", "anyOf", "oneOf", "prefixItems", "items"}
_NAMED = {"$defs", "definitions", "properties", "patternProperties", "dependentSchemas", "dependencies"}
_OLD = ("draft-03", "draft-04", "draft-06", "draft-07")  # keywords beside a $ref are ignored
_KNOWN = ("json-schema.org/draft-", "json-schema.org/draft/2019-09/schema", "json-schema.org/draft/2020-12/schema")


class Subschema:
    """A place in the document; the same place is always the same object."""

    __slots__ = ("schema", "base", "order")

    def __init__(self, schema: Any, base: str, order: int) -> None:
        self.schema = schema
        self.base = base  # the address that references in it are relative to
        self.order = order


def read(text: str) -> Any:
    """Numbers with a point stay exact: their spelling is what matters."""
    return json.loads(text, parse_float=Decimal, parse_constant=_no_constant)


class Document:
    def __init__(self, text: str) -> None:
        self.root_schema = read(text)
        root = self.root_schema if isinstance(self.root_schema, dict) else {}
        dialect = str(root.get("$schema", ""))
        if dialect and not any(known in dialect for known in _KNOWN):
            raise RequestError("$schema names an unknown dialect: use JSON Schema 2020-12 or draft-07.")
        self.is_old = any(old in dialect for old in _OLD)
        self._places: dict[int, Subschema] = {}
        self._made: list[Any] = []  # keeps schemas alive that are in no document: places are found by `id`
        self._resources: dict[str, Subschema] = {}  # by absolute address
        self._anchors: dict[str, Subschema] = {}  # by address#name
        self._dynamic: dict[str, list[Subschema]] = {}  # by the name of their $dynamicAnchor
        self.always = self._place(True, "")
        self.never = self._place(False, "")
        self.root = self._walk(self.root_schema, "")
        self._resources.setdefault("", self.root)

    def place(self, schema: Any, near: Subschema) -> Subschema:
        """The place of a schema found in another."""
        if isinstance(schema, bool):
            return self.always if schema else self.never
        found = self._places.get(id(schema))
        return found or self._place(schema, near.base)

    def made(self, schema: Any) -> Subschema:
        """A place for a schema that we wrote ourselves."""
        self._made.append(schema)
        return self._place(schema, "")

    def follow(self, reference: Any, near: Subschema, keyword: str = "$ref") -> Subschema:
        if not isinstance(reference, str):
            raise RequestError(f"{keyword} must be a string.")
        is_fragment = reference.startswith("#")
        address, fragment = urldefrag(near.base + reference if is_fragment else urljoin(near.base, reference))
        resource = self._resources.get(address)
        if resource is None:
            raise RequestError(
                f"{keyword} {reference[:80]!r} leads outside the schema, and nothing is fetched: put it into $defs."
            )
        if not fragment:
            return resource
        if not fragment.startswith("/"):
            anchor = self._anchors.get(f"{address}#{fragment}")
            if anchor is None:
                raise RequestError(f"{keyword} {reference[:80]!r} names no $anchor of the schema.")
            return anchor
        return self._descend(resource, fragment, f"{keyword} {reference[:80]!r}")

    def follow_dynamic(self, reference: Any, near: Subschema) -> Subschema:
        """Like $ref, as long as only one place of the document could be meant."""
        target = self.follow(reference, near, "$dynamicRef")
        name = reference.rpartition("#")[2]
        if len(self._dynamic.get(name, [])) > 1:
            raise RequestError("$dynamicRef with more than one $dynamicAnchor of its name is not supported: use $ref.")
        return target

    def _descend(self, resource: Subschema, pointer: str, shown: str) -> Subschema:
        here: Any = resource.schema
        base = resource.base
        for raw in pointer.split("/")[1:]:
            step = unquote(raw).replace("~1", "/").replace("~0", "~")
            is_number = step.isascii() and step.isdigit()
            if isinstance(here, list) and is_number and int(step) < len(here):
                here = here[int(step)]
            elif isinstance(here, dict) and step in here:
                here = here[step]
            else:
                raise RequestError(f"{shown} leads to nothing in the schema.")
            if id(here) in self._places:
                base = self._places[id(here)].base
        if not isinstance(here, (dict, bool)):
            raise RequestError(f"{shown} leads to something that is no schema.")
        return self.place(here, Subschema(here, base, 0))

    def _place(self, schema: Any, base: str) -> Subschema:
        place = Subschema(schema, base, len(self._places))
        self._places[id(schema)] = place
        return place

    def _walk(self, schema: Any, base: str) -> Subschema:
        if isinstance(schema, bool):
            return self.always if schema else self.never
        if not isinstance(schema, dict):
            raise RequestError("every schema must be an object or a boolean.")
        base = self._base(schema, base)
        place = self._place(schema, base)
        self._register(schema, place)
        for keyword, value in schema.items():
            if keyword in _LIST and isinstance(value, list):
                inner = value
            elif keyword in _NAMED and isinstance(value, dict):
                # Lists are not schemas: draft-07's `dependencies` has lists of names beside schemas.
                inner = [child for child in value.values() if not isinstance(child, list)]
            elif keyword in _ONE:
                inner = [value]
            else:
                continue
            for child in inner:
                self._walk(child, base)
        return place

    def _base(self, schema: dict, base: str) -> str:
        """The address that references inside the schema are relative to."""
        identity = schema.get("$id")
        is_hidden = self.is_old and "$ref" in schema
        if is_hidden or not isinstance(identity, str) or identity.startswith("#"):
            return base
        return urldefrag(urljoin(base, identity))[0]

    def _register(self, schema: dict, place: Subschema) -> None:
        identity = schema.get("$id")
        if self.is_old and "$ref" in schema:
            return
        if isinstance(identity, str):
            if identity.startswith("#"):  # draft-07's way to write an anchor
                self._anchors[place.base + identity] = place
            else:
                self._resources.setdefault(place.base, place)
        for keyword in ("$anchor", "$dynamicAnchor"):
            if isinstance(schema.get(keyword), str):
                self._anchors[f"{place.base}#{schema[keyword]}"] = place
        if isinstance(schema.get("$dynamicAnchor"), str):
            self._dynamic.setdefault(schema["$dynamicAnchor"], []).append(place)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
