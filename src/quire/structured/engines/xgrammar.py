"""The xgrammar engine: everything is lowered to GBNF by our own compiler, because its JSON schemas ignore what they do not know.

Used by `compiler.py`. Importing xgrammar takes seconds (it brings torch and transformers), so that happens when the first
engine is made, never on import of this file.
"""

import json
import os
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import numpy

from quire.errors import RequestError
from quire.messages import Vocabulary
from quire.structured.engines.base import Grammar, GrammarEngine, Matcher
from quire.structured.grammars.json_grammar import json_grammar
from quire.structured.grammars.pattern import whole
from quire.structured.grammars.rules import Rules, literal
from quire.structured.spec import GrammarSpec, is_lark

SIMPLE = {
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
        self._compilers = {frozenset(): self._compiler(frozenset())}  # by the special tokens that may be written

    def _compiler(self, written: frozenset[int]) -> Any:
        import xgrammar

        hidden = set(self.vocabulary.special_ids) - written
        tokens = [b"" if token_id in hidden else token for token_id, token in enumerate(self.vocabulary.tokens)]
        raw, size, stop_ids = xgrammar.VocabType.RAW, self.vocabulary.size, self.vocabulary.stop_ids
        info = xgrammar.TokenizerInfo(tokens, raw, vocab_size=size, stop_token_ids=stop_ids)
        return xgrammar.GrammarCompiler(info, max_threads=min(8, os.cpu_count() or 1), cache_enabled=False)

    def _compiler_for(self, spec: GrammarSpec) -> Any:
        """Special tokens are no text, except those that a structural tag spells: formats of tool calls are made of them."""
        if spec.kind != "structural_tag":
            return self._compilers[frozenset()]
        strings = [text.encode() for text in _strings(json.loads(spec.text))]
        spellings = {token_id: self.vocabulary.tokens[token_id] for token_id in self.vocabulary.special_ids}
        written = frozenset(
            token_id
            for token_id, spelling in spellings.items()
            if spelling and any(spelling in text for text in strings)
        )
        if written not in self._compilers:
            if len(self._compilers) >= MAX_COMPILERS:
                del self._compilers[next(key for key in self._compilers if key)]
            self._compilers[written] = self._compiler(written)
        return self._compilers[written]

    @staticmethod
    def lower(spec: GrammarSpec, compact: bool = False) -> GrammarSpec:
        if spec.kind == "json":
            return GrammarSpec("grammar", json_grammar(spec.text, compact))
        if spec.kind == "regex":
            return GrammarSpec("grammar", regex_grammar(spec.text))
        if spec.kind == "choice":
            choices = dict.fromkeys(json.loads(spec.text))
            return GrammarSpec("grammar", "root ::= " + " | ".join(map(literal, choices)) + "\n")
        if spec.kind == "structural_tag":
            return GrammarSpec("structural_tag", json.dumps(_lowered_tag(json.loads(spec.text), compact)))
        if is_lark(spec.text):
            raise RequestError("Lark grammars need the llguidance engine: choose it, or write GBNF (rules with ::=).")
        return spec

    def compile_lowered(self, spec: GrammarSpec) -> Grammar:
        compiler = self._compiler_for(spec)
        compile = compiler.compile_structural_tag if spec.kind == "structural_tag" else compiler.compile_grammar
        try:
            return _Grammar(compile(spec.text), self.vocabulary)
        except (RuntimeError, ValueError, TypeError) as error:  # the library raises these for what users write
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
        # Below the library's wrapper, which fetches the results one by one, at two calls and two turns of Python's lock each.
        accepted = _batch()._handle.batch_accept_token(
            [matcher._matcher._handle for matcher in matchers], list(token_ids), False
        )
        return [idx for idx, each in enumerate(accepted) if not each] if 0 in accepted or False in accepted else []

    @classmethod
    def fill_all(cls, matchers: Sequence[Matcher], masks: numpy.ndarray, rows: Sequence[int]) -> None:
        _batch()._handle.batch_fill_next_token_bitmask(
            [matcher._matcher._handle for matcher in matchers], masks, list(rows), False
        )

    @property
    def is_complete(self) -> bool:
        return self._matcher.is_completed()

    @property
    def terminated(self) -> bool:
        return self._matcher.is_terminated()


@cache
def _batch() -> Any:
    import xgrammar

    return xgrammar.BatchGrammarMatcher(max_threads=1)  # it would start its threads anew each time


def regex_grammar(pattern: str) -> str:
    rules = Rules()
    try:
        text = rules.gbnf(rules.language(whole(pattern), quoted=False))
    except RecursionError:
        raise RequestError("the regular expression is nested too deeply.") from None
    if text is None:
        raise RequestError("no text matches the regular expression.")
    return text


def _lowered_tag(value: Any, compact: bool) -> Any:
    """The schemas and patterns inside a structural tag as grammars of ours."""
    if isinstance(value, list):
        return [_lowered_tag(v, compact) for v in value]
    if not isinstance(value, dict):
        return value
    if "structures" in value:  # the older way to write it
        tags = [
            {"begin": s.get("begin"), "content": _schema_format(s.get("schema"), compact), "end": s.get("end")}
            for s in value["structures"]
        ]
        inner = {"type": "triggered_tags", "triggers": value.get("triggers"), "tags": tags}
        return {"type": "structural_tag", "format": inner}
    if value.get("type") in ("json_schema", "qwen_xml_parameter"):
        if value["type"] != "json_schema" or value.keys() - {"type", "json_schema", "style", "max_whitespace_cnt"}:
            raise RequestError("structural_tag: a json_schema takes no other option than its style: leave it out.")
        if value.get("style", "json") == "json":
            return _schema_format(value.get("json_schema"), compact)  # whose blanks are bounded anyway
        _check_simple(value.get("json_schema"))
        return value
    if value.get("type") == "regex" and isinstance(value.get("pattern"), str):
        return {"type": "grammar", "grammar": regex_grammar(value["pattern"])}
    return {name: _lowered_tag(v, compact) for name, v in value.items()}


def _check_simple(schema: Any) -> None:
    """In styles other than JSON the library's own reading of schemas is used: only of what it is known to honour."""
    json_grammar(json.dumps(schema))  # is it a schema, and can it be satisfied?
    schemas = [schema]
    while schemas:
        found = schemas.pop()
        if not isinstance(found, dict):
            continue
        if unknown := found.keys() - SIMPLE:
            raise RequestError(
                f"{min(unknown)!r:.60} is not supported in arguments that are not written as JSON: remove it."
            )
        schemas += [found.get("items"), found.get("additionalProperties"), *(found.get("properties") or {}).values()]


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _strings(inner)


def _schema_format(schema: Any, compact: bool) -> dict[str, str]:
    return {"type": "grammar", "grammar": json_grammar(json.dumps(schema), compact)}


def _sentence(error: Exception) -> str:
    """The library's last line without its time stamp and source file."""
    lines = [line for line in str(error).strip().splitlines() if line.strip()] or ["unknown reason"]
    return lines[-1].rpartition(".cc:")[2].partition(": ")[2][:200].rstrip(".") or "it is not valid"
