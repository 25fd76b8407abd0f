"""Tests marked `long` prove more combinations than `make test` has time for; `make test-all` runs them too."""

from collections.abc import Iterable

import pytest

LONG = pytest.mark.long


def long_but(values: Iterable, *short: object) -> list:
    """Parameters, of which `make test` runs the `short` ones. A tuple holds the values of several names."""
    found = []
    for value in values:
        parts = value if isinstance(value, tuple) else (value,)
        found.append(pytest.param(*parts, marks=[] if value in short else LONG))
    return found
