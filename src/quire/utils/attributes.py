"""A dict whose values are attributes, too: what libraries that users know give back in this way."""

from typing import Any


class Attributes(dict[str, Any]):
    """`values["name"]` and `values.name`."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None
