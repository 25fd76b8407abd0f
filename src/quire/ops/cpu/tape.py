"""Tapes: a sequence of compiled calls, recorded once and played again without the Python between them.

What a CUDA graph is to a GPU. `worker/cpu/graphs.py` records a forward pass whose inputs lie in fixed buffers. Playing
the tape computes the same on whatever these buffers hold by then, for as many rows as are asked for. The modules
`ops/*/cpu.py` make their calls through `compiled` or `bind`, so all of them are recorded. Knows pointers and calls, not
what they compute.

In a 135M model a step of one row spends more time in Python than in kernels; a tape saves that time.
"""

import bisect
import ctypes
import math
import threading
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from quire.ops.cpu.build import load

_ALIGNMENT = 64

# In a recorded pass torch may only allocate and take views. It must not compute: a tape would not repeat that.
_ALLOCATES = {"aten::empty", "aten::new_empty", "aten::empty_like"}
_VIEWS = {
    "aten::view",
    "aten::_unsafe_view",
    "aten::split",
    "aten::split_with_sizes",
    "aten::slice",
    "aten::select",
    "aten::alias",
    "aten::detach",
    "aten::as_strided",
}


class Rows(ctypes.c_int64):
    """Type of the argument that says how many rows a call computes: the only number that may differ in a replay."""


class CompiledFunction(Protocol):
    """A function of a library loaded with ctypes."""

    argtypes: list[type]

    def __call__(self, *args: Any) -> None: ...


class _Thread(threading.local):
    """Each thread records only its own calls: other engines may compute in other threads."""

    recording: "Recording | None" = None


_thread = _Thread()


def bind(library: ctypes.CDLL, name: str, argtypes: Iterable[type]) -> Callable[..., None]:
    """A compiled function without a result, as a callable whose calls are recorded."""
    function: Any = getattr(library, name)
    function.argtypes, function.restype = list(argtypes), None

    def call(*args: object) -> None:
        function(*args)
        if _thread.recording is not None:
            _thread.recording.calls.append((function, args))

    return call


def compiled(source: str, *defines: str, **functions: Iterable[type]) -> SimpleNamespace:
    """The functions of `src/<source>.cpp`, named without "quire_", as callables whose calls are recorded.

    `defines`: as `build.load` takes them. Also has `available`: False where nothing could be compiled, so that there
    are no functions and twins must run.
    """
    library = load(source, *defines)
    if library is None:
        return SimpleNamespace(available=False)
    callables = {name: bind(library, f"quire_{name}", argtypes) for name, argtypes in functions.items()}
    return SimpleNamespace(available=True, **callables)


class Recording(TorchDispatchMode):
    """`with Recording() as r: out = forward(…)`, then `r.tape(out, max_rows)`.

    Record at least two rows: to torch any single row is contiguous, so the wrappers would skip copies that more rows
    need.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[CompiledFunction, tuple]] = []
        self.buffers: list[Tensor] = []  # all that was allocated meanwhile, kept so that no address is used twice
        self.computed: set[str] = set()  # the operations that torch itself has computed

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise torch would import its compiler: two seconds more for the first answer

    def __enter__(self) -> "Recording":
        _thread.recording = self
        return super().__enter__()

    def __exit__(self, *exception: object) -> None:
        _thread.recording = None
        super().__exit__(*exception)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = function._schema.name
        if name in _ALLOCATES:
            self.buffers.append(result)
        elif name not in _VIEWS:
            self.computed.add(name.removeprefix("aten::"))
        return result

    def tape(self, output: Tensor, max_rows: int) -> "Tape | None":
        """The pass as a tape that can be played for up to `max_rows`; None if it cannot be repeated."""
        num_rows = len(output)
        for function, args in self.calls:
            if any(kind is Rows and arg != num_rows for kind, arg in zip(function.argtypes, args)):
                return None
        if self.computed or any(len(buffer) != num_rows for buffer in self.buffers):
            return None
        return Tape(self, output, max_rows)


class Tape:
    """Calls whose arguments are already converted, and whose buffers have been moved into one small arena."""

    def __init__(self, recording: Recording, output: Tensor, max_rows: int) -> None:
        starts = sorted(buffer.data_ptr() for buffer in recording.buffers)
        recorded = {buffer.data_ptr(): buffer.nbytes for buffer in recording.buffers}
        sizes = {start: num_bytes // len(output) * max_rows for start, num_bytes in recorded.items()}

        def owner(kind: type, argument: Any) -> int | None:
            """The start of the buffer that a pointer argument points into.

            Arguments of other types are no addresses.
            """
            if kind is not ctypes.c_void_p or argument is None:
                return None
            idx = bisect.bisect_right(starts, argument) - 1
            return starts[idx] if idx >= 0 and argument < starts[idx] + recorded[starts[idx]] else None

        places, arena_bytes = _pack(recording.calls, sizes, owner, keep=owner(ctypes.c_void_p, output.data_ptr()))
        self.arena = torch.empty(arena_bytes + _ALIGNMENT, dtype=torch.uint8)
        base = -(-self.arena.data_ptr() // _ALIGNMENT) * _ALIGNMENT
        self.rows = Rows(len(output))  # all calls are given this one object

        def converted(kind: type, argument: Any) -> object:
            if kind is Rows:
                return self.rows
            start = owner(kind, argument)
            return kind(argument if start is None else argument - start + base + places[start])

        self.calls = [(function, tuple(map(converted, function.argtypes, args))) for function, args in recording.calls]
        offset = base + places[output.data_ptr()] - self.arena.data_ptr()
        shape = max_rows, *output.shape[1:]
        self.output = self.arena[offset : offset + math.prod(shape) * output.itemsize].view(output.dtype).view(shape)

    def play(self, num_rows: int) -> Tensor:
        self.rows.value = num_rows
        for function, args in self.calls:
            function(*args)
        return self.output[:num_rows]


def _pack(
    calls: list[tuple[CompiledFunction, tuple]],
    sizes: dict[int, int],
    owner: Callable[[type, Any], int | None],
    keep: int | None,
) -> tuple[dict[int, int], int]:
    """(each buffer's offset in an arena, the arena's size).

    Buffers whose lifetimes (from the first to the last call that uses them) do not overlap may share memory.
    """
    last_use: dict[int, int] = {}
    for idx, (function, args) in enumerate(calls):
        for start in map(owner, function.argtypes, args):
            if start is not None:
                last_use[start] = idx
    if keep is not None:
        last_use[keep] = len(calls)
    places: dict[int, int] = {}
    alive: list[tuple[int, int, int]] = []  # (offset, end, buffer) in order of offset
    arena_bytes = 0
    for idx, (function, args) in enumerate(calls):
        alive = [entry for entry in alive if last_use[entry[2]] >= idx]
        for start in map(owner, function.argtypes, args):
            if start is None or start in places:
                continue
            size = -(-sizes[start] // _ALIGNMENT) * _ALIGNMENT
            offset = 0
            for taken, end, _ in alive:
                if taken - offset >= size:
                    break
                offset = max(offset, end)
            places[start] = offset
            bisect.insort(alive, (offset, offset + size, start))
            arena_bytes = max(arena_bytes, offset + size)
    return places, arena_bytes
