"""The xgrammar engine. Our own compiler lowers everything to GBNF: the library ignores keywords it does not know.

Used by `compiler.py`. Importing xgrammar takes seconds (it imports torch and transformers), so that happens when the
first engine is made, never on import of this file.
"""

import json
import os
import re
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import numpy

from quire.errors import RequestError
from quire.messages import Vocabulary
from quire.structured.engines.base import Grammar, GrammarEngine, Matcher
from quire.structured.grammars.gbnf import gbnf_grammar
from quire.structured.grammars.json_grammar import json_grammar, quoted_grammar, untyped_grammar
from quire.structured.grammars.pattern import whole
from quire.structured.grammars.rules import Rules, literal
from quire.structured.spec import GrammarSpec, is_lark

_ESCAPED = re.compile(r"\\u(00[0-9a-f]{2})")  # as grammars of ours write what is no letter
SIMPLE = {  # keywords of JSON schemas that the library itself is known to honour
    "type",
    "properties",
    "required",
    "enum",
    "const",
    "items",
    "additionalProperties",
    "description",
    "title",
    "default",
    "$schema",
}
MAX_COMPILERS = 4  # each holds the vocabulary, sorted


class XGrammar(GrammarEngine):
    name = "xgrammar"

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        # By the special tokens that may be written.
        self._compilers: dict[frozenset[int], Any] = {frozenset(): self._compiler(frozenset())}

    def _compiler(self, written: frozenset[int]) -> Any:
        import xgrammar

        hidden = set(self.vocabulary.special_ids) - written
        tokens = [b"" if token_id in hidden else token for token_id, token in enumerate(self.vocabulary.tokens)]
        info = xgrammar.TokenizerInfo(
            tokens,
            xgrammar.VocabType.RAW,
            vocab_size=self.vocabulary.size,
            stop_token_ids=self.vocabulary.stop_ids,
        )
        return xgrammar.GrammarCompiler(info, max_threads=min(8, os.cpu_count() or 1), cache_enabled=False)

    def _compiler_for(self, spec: GrammarSpec) -> Any:
        """Special tokens are no text, except those that a structural tag spells: formats of tool calls use them."""
        if spec.kind != "structural_tag":
            return self._compilers[frozenset()]
        texts = [_ESCAPED.sub(_unescaped, text).encode() for text in _strings(json.loads(spec.text))]

        def is_written(token_id: int) -> bool:
            spelling = self.vocabulary.tokens[token_id]
            return spelling != b"" and any(spelling in text for text in texts)

        written = frozenset(filter(is_written, self.vocabulary.special_ids))
        if written not in self._compilers:
            if len(self._compilers) >= MAX_COMPILERS:
                del self._compilers[next(key for key in self._compilers if key)]
            self._compilers[written] = self._compiler(written)
        return self._compilers[written]

    @staticmethod
    def lower(spec: GrammarSpec, blanks: str | None = None) -> GrammarSpec:
        if spec.kind == "json":
            return GrammarSpec("grammar", json_grammar(spec.text, blanks))
        if spec.kind == "regex":
            return GrammarSpec("grammar", regex_grammar(spec.text))
        if spec.kind == "choice":
            choices = dict.fromkeys(json.loads(spec.text))
            return GrammarSpec("grammar", "root ::= " + " | ".join(map(literal, choices)) + "\n")
        if spec.kind == "gbnf":
            return GrammarSpec("grammar", gbnf_grammar(spec.text))
        if spec.kind == "structural_tag":
            return GrammarSpec("structural_tag", json.dumps(_lowered_tag(json.loads(spec.text), blanks)))
        if is_lark(spec.text):
            raise RequestError("Lark grammars need the llguidance engine: choose it, or write GBNF (rules with ::=).")
        return spec

    def compile_lowered(self, spec: GrammarSpec) -> Grammar:
        compiler = self._compiler_for(spec)
        is_tag = spec.kind == "structural_tag"
        compile_text = compiler.compile_structural_tag if is_tag else compiler.compile_grammar
        try:
            return _Grammar(compile_text(spec.text), self.vocabulary)
        except (RuntimeError, ValueError, TypeError) as error:  # what the library raises for mistakes of users
            raise RequestError(f"the {spec.kind} cannot be compiled: {_sentence(error)}.") from None


class _Grammar(Grammar):
    def __init__(self, compiled: Any, vocabulary: Vocabulary) -> None:
        self._compiled, self._vocabulary = compiled, vocabulary
        self.num_bytes = compiled.memory_size_bytes

    def _matcher(self) -> Matcher:
        return _Matcher(self._compiled, self._vocabulary)


class _Matcher(Matcher):
    def __init__(self, compiled: Any, vocabulary: Vocabulary) -> None:
        import xgrammar

        super().__init__(vocabulary)
        self._matcher = xgrammar.GrammarMatcher(compiled)

    def _accept(self, token_id: int) -> bool:
        return self._matcher.accept_token(token_id)

    def rollback(self, count: int) -> None:
        self._matcher.rollback(count)

    def _fill(self, mask: numpy.ndarray) -> None:
        self._matcher.fill_next_token_bitmask(mask[None, :])

    @classmethod
    def accept_all(cls, matchers: Sequence[Matcher], token_ids: Sequence[int]) -> list[int]:
        # Not through the library's Python wrapper: it fetches the results one by one, and takes Python's lock for each.
        handles = [matcher._matcher._handle for matcher in matchers]
        accepted = _batch()._handle.batch_accept_token(handles, list(token_ids), False)
        return [idx for idx, fits in enumerate(accepted) if not fits]

    @classmethod
    def fill_all(cls, matchers: Sequence[Matcher], masks: numpy.ndarray, rows: Sequence[int]) -> None:
        handles = [matcher._matcher._handle for matcher in matchers]
        _batch()._handle.batch_fill_next_token_bitmask(handles, masks, list(rows), False)

    @property
    def is_complete(self) -> bool:
        return self._matcher.is_completed()

    @property
    def terminated(self) -> bool:
        return self._matcher.is_terminated()


@cache
def _batch() -> Any:
    import xgrammar

    return xgrammar.BatchGrammarMatcher(max_threads=1)  # with more, it would start threads in every call


def regex_grammar(pattern: str) -> str:
    rules = Rules()
    try:
        text = rules.gbnf(rules.language(whole(pattern), quoted=False))
    except RecursionError:
        raise RequestError("the regular expression is nested too deeply.") from None
    if text is None:
        raise RequestError("no text matches the regular expression.")
    return text


def _lowered_tag(value: Any, blanks: str | None) -> Any:
    """The structural tag with its schemas, patterns and grammars of llama.cpp replaced by grammars of ours."""
    if isinstance(value, list):
        return [_lowered_tag(inner, blanks) for inner in value]
    if not isinstance(value, dict):
        return value
    if "structures" in value:  # the older way to write it
        tags = [_tag_of(structure, blanks) for structure in value["structures"]]
        triggered = {"type": "triggered_tags", "triggers": value.get("triggers"), "tags": tags}
        return {"type": "structural_tag", "format": triggered}
    if value.get("type") in ("json_schema", "qwen_xml_parameter"):
        if value["type"] != "json_schema" or value.keys() - _SCHEMA_OPTIONS:
            raise RequestError("structural_tag: a json_schema takes no other option than its style: leave it out.")
        return _lowered_schema(value, blanks)
    if value.get("type") == "gbnf" and isinstance(value.get("grammar"), str):
        return {"type": "grammar", "grammar": gbnf_grammar(value["grammar"])}
    if value.get("type") == "regex" and isinstance(value.get("pattern"), str):
        return {"type": "grammar", "grammar": regex_grammar(value["pattern"])}
    return {name: _lowered_tag(inner, blanks) for name, inner in value.items()}


_SCHEMA_OPTIONS = {"type", "json_schema", "style", "max_whitespace_cnt", "no_string", "quote"}


def _lowered_schema(value: dict[str, Any], blanks: str | None) -> dict[str, Any]:
    """A schema in one of our styles as a grammar: JSON, a value without quotes, or strings in other quotes."""
    schema = json.dumps(value.get("json_schema"))
    match value:
        case {"style": "untyped", "no_string": str(no_string)}:
            return {"type": "grammar", "grammar": untyped_grammar(schema, no_string, blanks)}
        case {"style": "quoted", "quote": str(quote)} if quote:
            return {"type": "grammar", "grammar": quoted_grammar(schema, quote)}
        case {"no_string": _} | {"quote": _}:
            raise RequestError("structural_tag: no_string and quote belong to the styles untyped and quoted.")
    if value.get("style", "json") == "json":
        return _schema_format(value.get("json_schema"), blanks)  # whose blanks are ours
    _check_simple(value.get("json_schema"))
    return value


def _tag_of(structure: dict[str, Any], blanks: str | None) -> dict[str, Any]:
    content = _schema_format(structure.get("schema"), blanks)
    return {"begin": structure.get("begin"), "content": content, "end": structure.get("end")}


def _check_simple(schema: Any) -> None:
    """In styles other than JSON the library reads the schema itself: only with keywords it is known to honour."""
    json_grammar(json.dumps(schema))  # is it a schema, and can it be satisfied?
    stack = [schema]
    while stack:
        subschema = stack.pop()
        if not isinstance(subschema, dict):
            continue
        if unknown := subschema.keys() - SIMPLE:
            raise RequestError(
                f"{min(unknown)!r:.60} is not supported in arguments that are not written as JSON: remove it."
            )
        stack += [subschema.get("items"), subschema.get("additionalProperties")]
        stack += (subschema.get("properties") or {}).values()


def _unescaped(match: re.Match[str]) -> str:
    return chr(int(match[1], 16))


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _strings(inner)


def _schema_format(schema: Any, blanks: str | None) -> dict[str, str]:
    return {"type": "grammar", "grammar": json_grammar(json.dumps(schema), blanks)}


def _sentence(error: Exception) -> str:
    """The library's last line without its time stamp and source file."""
    lines = [line for line in str(error).strip().splitlines() if line.strip()] or ["unknown reason"]
    return lines[-1].rpartition(".cc:")[2].partition(": ")[2][:200].rstrip(".") or "it is not valid"
