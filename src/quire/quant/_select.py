"""Which weights a checkpoint's quantization means: names, patterns and lists of exceptions in its config.

Used by the files of this folder that read published checkpoints. Patterns come from files that anybody may have made:
they are bounded, so that matching the names of a model takes no time worth speaking of.
"""

import fnmatch
import re
import re._parser as parser  # type: ignore[import-not-found]  # what `re` itself parses with: it has no types
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any, ClassVar

from torch import Tensor

from quire.errors import BadModelFileError, UnsupportedModelError
from quire.ops.packed_linear.forms import Coded, Form, stacked
from quire.quant.base import PLAIN, Choice, MethodMaker, Part, Reader, Stored, Use

CPU_VALUES_AT_ONCE, GPU_VALUES_AT_ONCE = 1 << 18, 1 << 24  # of a weight that is rounded or looked at
MAX_NAMES = 20_000
MAX_PATTERN_CHARS = 300
MAX_REPEATS = 4  # in one pattern; inside one there may be neither another nor alternatives
MAX_WAYS = 10_000  # to choose among all alternatives of one pattern
REPEATS = (parser.MAX_REPEAT, parser.MIN_REPEAT, parser.POSSESSIVE_REPEAT)
COSTS = (1, 1, 4, 40, 200)  # by the number of repeats: about how many microseconds it may take to match a path
MAX_COST = 2_000  # of all patterns of a list


def pattern(text: Any, key: str) -> re.Pattern[str]:
    """Compiles a pattern of a config; BadModelFileError if it is no pattern, or could take long."""
    return _compiled(text, key)[0]


def patterns(texts: Iterable[Any], key: str) -> list[re.Pattern[str]]:
    """Several, which could not take long together either."""
    found = []
    total = 0
    for text in texts:
        compiled, cost = _compiled(text, key)
        found.append(compiled)
        total += cost
        if total > MAX_COST:
            raise BadModelFileError(
                f"{key} holds so many patterns that they could take long: {MAX_COST:,} with one repeat each are read, "
                f"{MAX_COST // COSTS[2]} with two"
            )
    return found


def _compiled(text: Any, key: str) -> tuple[re.Pattern[str], int]:
    """And what matching may cost."""
    if not isinstance(text, str) or len(text) > MAX_PATTERN_CHARS:
        raise BadModelFileError(f"{key} holds a pattern that is no text of at most {MAX_PATTERN_CHARS} characters")
    try:
        parsed = parser.parse(text)
        num_repeats, num_ways = _count(parsed, inside=False)
        compiled = re.compile(text)
    except (re.error, OverflowError, RecursionError):
        raise BadModelFileError(f"{key} holds {text!r:.100}, which is no regular expression") from None
    if num_repeats > MAX_REPEATS:
        raise BadModelFileError(
            f"{key} holds the pattern {text!r:.100}, which could take long: at most {MAX_REPEATS} repeats are read, "
            "with neither others nor alternatives inside"
        )
    if num_ways > MAX_WAYS:
        raise BadModelFileError(f"{key} holds the pattern {text!r:.100}, which has too many alternatives")
    ends_anyhow = any(last in REPEATS and value[0] == 0 for last, value in parsed[-1:])  # such an end always fits
    return compiled, COSTS[num_repeats - ends_anyhow] * (1 + num_ways // 100)


def _count(tree: Any, inside: bool) -> tuple[int, int]:
    """How many parts may be repeated, and in how many ways alternatives can be chosen.

    Too many may be repeated, if what they repeat can itself match in several ways.
    """
    num_repeats, num_ways = 0, 1
    for operation, value in tree:
        is_repeat, is_branch = operation in REPEATS, operation is parser.BRANCH
        if str(operation).startswith("GROUPREF") or (inside and (is_repeat or is_branch)):
            num_repeats += MAX_REPEATS + 1
        num_repeats += is_repeat
        num_ways *= len(value[1]) if is_branch else 1
        for part in _subtrees(value):
            more_repeats, more_ways = _count(part, inside or is_repeat)
            num_repeats += more_repeats
            num_ways *= more_ways
    return num_repeats, num_ways


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
    is_list = isinstance(value, list) and len(value) <= MAX_NAMES and all(isinstance(name, str) for name in value)
    if not is_list:
        raise BadModelFileError(f"{key} is not a list of at most {MAX_NAMES:,} names")
    return value


def nested_names(value: Any, key: str) -> list[str]:
    """A list of names, or of lists of names."""
    if isinstance(value, list) and all(isinstance(part, list) for part in value):
        value = [name for part in value for name in part]
    return names(value, key)


def objects(settings: dict[str, Any], key: str) -> dict[str, dict[str, Any]]:
    """An object of objects in the config, which may be missing."""
    value = settings.get(key) or {}
    is_table = isinstance(value, dict) and len(value) <= MAX_NAMES
    if not is_table or not all(isinstance(part, dict) for part in value.values()):
        raise BadModelFileError(
            f"quantization_config gives {key} as something else than an object of at most {MAX_NAMES:,} objects"
        )
    return value


class Modules:
    """A list as transformers reads it: a pattern for the beginning of a path, up to a dot, or a path's last names."""

    def __init__(self, value: Any, key: str) -> None:
        listed = names(value, key)
        self.whole = frozenset(listed)
        self.beginnings = patterns((f"(?:{name})(?:\\.|$)" for name in listed if not is_plain(name)), key)

    def __contains__(self, path: str) -> bool:
        parents = path.split(".")
        beginnings = [parents[:count] for count in range(1, len(parents) + 1)]
        ends = [parents[first:] for first in range(1, len(parents))]
        is_listed = any(".".join(part) in self.whole for part in (*beginnings, *ends))
        return is_listed or any(known.match(path) for known in self.beginnings)


class Stretches:
    """A list as GPTQ has it, of names or of lists of names: a path contains one of them, from dot to dot."""

    def __init__(self, value: Any, key: str) -> None:
        self.whole = frozenset(nested_names(value, key))

    def __contains__(self, path: str) -> bool:
        parts = path.split(".")
        bounds = combinations(range(len(parts) + 1), 2)
        return any(".".join(parts[first:end]) in self.whole for first, end in bounds)


def is_plain(name: str) -> bool:
    """Whether it is a name, and no pattern."""
    return re.fullmatch(r"[\w.-]*", name) is not None


class Targets:
    """A list as compressed-tensors reads it: a whole path, "re:" and a pattern, or the class of layers, Linear."""

    def __init__(self, value: Any, key: str) -> None:
        listed = names(value, key)
        self.whole = frozenset(name for name in listed if not name.startswith("re:"))
        self.patterns = patterns((name.removeprefix("re:") for name in listed if name.startswith("re:")), key)

    def __contains__(self, path: str) -> bool:
        return path in self.whole or any(known.match(path) for known in self.patterns)

    @property
    def all_linear(self) -> bool:
        return "Linear" in self.whole


class Globs:
    """A list as modelopt writes it: paths in which * stands for anything."""

    def __init__(self, value: Any, key: str) -> None:
        listed = names(value, key)
        self.whole = frozenset(listed)
        self.patterns = patterns((_merged_stars(name) for name in listed if not is_plain(name)), key)

    def __contains__(self, path: str) -> bool:
        return path in self.whole or any(known.match(path) for known in self.patterns)


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


def refuse_settings(settings: dict[str, Any]) -> None:
    """Where a config names one of our own ways to round plain weights, which have no settings."""
    refuse(settings, *(key for key in settings if key != "quant_method"))


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


def choice(settings: dict[str, Any], key: str, allowed: Iterable[Any], default: Any = None, owner: str = "") -> Any:
    """A value of the config that must be one of a few. `owner`: where it stands, for the error's text."""
    value = settings.get(key, default)
    listed = list(allowed)
    if not any(value is known or (type(value) is type(known) and value == known) for known in listed):
        options = ", ".join(str(known) for known in listed)
        raise BadModelFileError(f"quantization_config gives {owner}{key} as {value!r:.60}: {options} can be read")
    return value


def check(settings: dict[str, Any], allowed: Mapping[str, Sequence[Any]], owner: str = "") -> None:
    """Refuses values other than those that are allowed; a key may be missing, or null."""
    for key, values in allowed.items():
        if settings.get(key) is not None:
            choice(settings, key, values, owner=owner)


def refuse(settings: dict[str, Any], *keys: str) -> None:
    """What has no meaning here: keys that must be missing, null, false, zero or empty."""
    for key in keys:
        if settings.get(key):
            raise UnsupportedModelError(f"quantization_config has {key}, which is not supported")
