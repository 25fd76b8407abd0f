"""Which weights a checkpoint's quantization means: names, patterns and lists of exceptions in its config.

Used by the files of this folder that read published checkpoints. Patterns come from files that anybody may have made:
they are bounded, so that matching the names of a model takes no time worth speaking of.
"""

import fnmatch
import re
import re._parser as parser  # type: ignore[import-not-found]  # what `re` itself parses with: it has no types
from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

from torch import Tensor

from quire.errors import BadModelFileError, UnsupportedModelError
from quire.ops.packed_linear.forms import Coded, Form, stacked
from quire.quant.base import PLAIN, Choice, MethodMaker, Part, Reader, Stored, Use

CPU_VALUES_AT_ONCE, GPU_VALUES_AT_ONCE = 1 << 20, 1 << 24  # of a weight that is being rounded
MAX_PATTERN_CHARS = 300
MAX_PATTERNS = 20_000
MAX_REPEATS = 4  # in one pattern; inside one there may be neither another nor alternatives


def pattern(text: Any, key: str) -> re.Pattern[str]:
    """Compiles a pattern of a config; BadModelFileError if it is no pattern, or could take long."""
    if not isinstance(text, str) or len(text) > MAX_PATTERN_CHARS:
        raise BadModelFileError(f"{key} holds a pattern that is no text of at most {MAX_PATTERN_CHARS} characters")
    try:
        num_repeats = _count_repeats(parser.parse(text), inside=False)
        compiled = re.compile(text)
    except (re.error, OverflowError, RecursionError):
        raise BadModelFileError(f"{key} holds {text!r:.100}, which is no regular expression") from None
    if num_repeats > MAX_REPEATS:
        raise BadModelFileError(
            f"{key} holds the pattern {text!r:.100}, which could take long: at most {MAX_REPEATS} repeats are read, "
            "with neither others nor alternatives inside"
        )
    return compiled


def _count_repeats(tree: Any, inside: bool) -> int:
    """How many parts may be repeated; too many, if what they repeat can itself match in several ways."""
    count = 0
    for operation, value in tree:
        is_repeat = operation in (parser.MAX_REPEAT, parser.MIN_REPEAT, parser.POSSESSIVE_REPEAT)
        is_varied = is_repeat or str(operation) == "BRANCH"
        if str(operation).startswith("GROUPREF") or (inside and is_varied):
            count += MAX_REPEATS + 1
        count += is_repeat
        for part in _subtrees(value):
            count += _count_repeats(part, inside or is_repeat)
    return count


def _subtrees(value: Any) -> list[Any]:
    if isinstance(value, parser.SubPattern):
        return [value]
    if isinstance(value, list | tuple):
        return [tree for part in value for tree in _subtrees(part)]
    return []


def names(value: Any, key: str) -> list[str]:
    """A list of names in a config, which may be missing."""
    if value is None:
        return []
    is_list = isinstance(value, list) and len(value) <= MAX_PATTERNS and all(isinstance(name, str) for name in value)
    if not is_list:
        raise BadModelFileError(f"{key} is not a list of at most {MAX_PATTERNS:,} names")
    return value


class Modules:
    """A list as transformers reads it: a pattern for the beginning of a path, up to a dot, or a path's last names."""

    def __init__(self, value: Any, key: str) -> None:
        listed = names(value, key)
        self.suffixes = tuple(f".{name}" for name in listed)
        self.whole = frozenset(listed)
        self.beginnings = [pattern(f"(?:{name})(?:\\.|$)", key) for name in listed if not _is_plain(name)]

    def __contains__(self, path: str) -> bool:
        parents = path.split(".")
        is_listed = any(".".join(parents[:count]) in self.whole for count in range(1, len(parents) + 1))
        return is_listed or path.endswith(self.suffixes) or any(known.match(path) for known in self.beginnings)


def _is_plain(name: str) -> bool:
    return re.fullmatch(r"[\w.-]*", name) is not None


class Targets:
    """A list as compressed-tensors reads it: a whole path, "re:" and a pattern, or the class of layers, Linear."""

    def __init__(self, value: Any, key: str) -> None:
        listed = names(value, key)
        self.whole = frozenset(name for name in listed if not name.startswith("re:"))
        self.patterns = [pattern(name.removeprefix("re:"), key) for name in listed if name.startswith("re:")]

    def __contains__(self, path: str) -> bool:
        return path in self.whole or any(known.match(path) for known in self.patterns)

    @property
    def all_linear(self) -> bool:
        return "Linear" in self.whole


class Globs:
    """A list as modelopt writes it: paths in which * stands for anything."""

    def __init__(self, value: Any, key: str) -> None:
        self.patterns = [pattern(_merged_stars(name), key) for name in names(value, key)]

    def __contains__(self, path: str) -> bool:
        return any(known.match(path) for known in self.patterns)


def _merged_stars(name: str) -> str:
    return fnmatch.translate(re.sub(r"\*+", "*", name))


class PlainReader(Reader):
    """Plain numbers of a checkpoint, which `round` rounds."""

    group: ClassVar[int] = 1  # inputs that share a scale must be whole groups
    bits: ClassVar[float]  # of a number and its share of scales, once it is rounded

    def stored(self, part: Part) -> Iterable[Stored]:
        if part.shape[-1] % self.group:
            raise UnsupportedModelError(
                f"{part.path} has {part.shape[-1]} inputs, which groups of {self.group} do not divide"
            )
        yield Stored(part.end, part.shape, tuple(PLAIN), is_codes=True, bits=self.bits)

    def read(self, part: Part, tensors: dict[str, Tensor]) -> Form:
        """Some rows at a time, so that a large weight never exists in float32 as a whole."""
        weight_NK = tensors[part.end].reshape(part.num_rows, -1)
        at_once = CPU_VALUES_AT_ONCE if weight_NK.device.type == "cpu" else GPU_VALUES_AT_ONCE
        num_rows = max(1, at_once // weight_NK.shape[1])
        return stacked((self.round(rows.float()) for rows in weight_NK.split(num_rows)), len(weight_NK))

    @abstractmethod
    def round(self, weight_NK: Tensor) -> Coded:
        """The form nearest to a weight in float32."""


def while_loading(reader: PlainReader, head_on_cpus: bool = False) -> Callable[[str, Choice], MethodMaker]:
    """For checkpoints with plain weights: those of products and experts are rounded by the reader.

    Embeddings and heads are not; with `head_on_cpus`, a head on a CPU is, and so is an embedding that it is tied to.
    """

    def find(path: str, ways: Choice) -> MethodMaker:
        is_head = ways.use in (Use.HEAD, Use.TIED_ROWS) and head_on_cpus and not ways.is_gpu
        is_rounded = is_head or ways.use in (Use.PRODUCT, Use.EXPERTS)
        return ways.read_by(reader) if is_rounded else ways.plain

    return find


def group_size(settings: dict[str, Any]) -> int:
    """How many neighbouring inputs share a scale; 0: all of them."""
    group: Any = settings.get("group_size")
    is_size = type(group) is int and (group == -1 or 0 < group < 2**20)
    if not is_size:
        raise BadModelFileError(
            f"quantization_config gives group_size as {group!r:.60}: -1 or a number above 0 is read"
        )
    return max(0, group)


def choice(settings: dict[str, Any], key: str, allowed: Iterable[Any], default: Any = None) -> Any:
    """A value of the config that must be one of a few."""
    value = settings.get(key, default)
    listed = list(allowed)
    if not any(value is known or (type(value) is type(known) and value == known) for known in listed):
        options = ", ".join(str(known) for known in listed)
        raise BadModelFileError(f"quantization_config gives {key} as {value!r:.60}: {options} can be read")
    return value
