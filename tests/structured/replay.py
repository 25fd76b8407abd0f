"""A matcher brought to where a test wants it."""

from collections.abc import Iterable

from quire.structured.engines.base import Grammar, Matcher


def replayed(grammar: Grammar, token_ids: Iterable[int]) -> Matcher | None:
    """A matcher that has accepted these tokens; None if they do not fit the grammar."""
    matcher = grammar.matcher()
    return matcher if all(matcher.accept(token_id) for token_id in token_ids) else None
