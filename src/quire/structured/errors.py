"""One refusal that the compiler tells apart from the others: it is about syntax, so another engine may be asked."""

from quire.errors import RequestError


class PatternError(RequestError):
    """A regular expression that our own compiler does not take."""
