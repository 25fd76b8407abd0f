"""The error for which the compiler tries another engine: it is about syntax, which another engine may know."""

from quire.errors import RequestError


class PatternError(RequestError):
    """A regular expression that our own compiler does not take."""
