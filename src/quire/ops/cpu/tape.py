"""Tapes: a sequence of compiled calls, recorded once and played again without the Python between them.

What a CUDA graph is to a GPU. `worker/cpu/graphs.py` records a forward pass whose inputs lie in fixed buffers; playing it computes
the same thing on whatever the buffers hold by then, for as many rows as are asked for. The wrappers beside this file make their
calls through `compiled` or `bind`, so a tape sees them all. Knows pointers and calls, not what they compute.

On an 135M model a step of one row spends more time in Python than in kernels; a tape gives that time back.
"""

import bisect
import ctypes
import math
import threading
from collections.abc import Callable, Iterable
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from quire.ops.cpu.build import load

_ALIGNMENT = 64

# torch's part in a recorded pass may be to name memory, never to compute: a tape would not repeat that.
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
    """Type of the argument that says how many rows a call computes: the one number that may differ when it is played."""


class _Thread(threading.local):
    """Engines in other threads compute, and record, by themselves."""

    recording: "Recording | None" = None


_thread = _Thread()


def bind(library: ctypes.CDLL, name: str, argtypes: Iterable[type]) -> Callable[..., None]:
    """A compiled function without a result, as a callable that a tape can hear."""
    function = getattr(library, name)
    function.argtypes, function.restype = list(argtypes), None

    def call(*args: object) -> None:
        function(*args)
        if _thread.recording is not None:
            _thread.recording.calls.append((function, args))

    return call


def compiled(source: str, **functions: Iterable[type]) -> SimpleNamespace | None:
    """The functions of `src/<source>.cpp`, named without "quire_", as callables that a tape can hear; None: twins must run."""
    library = load(source)
    if library is None:
        return None
    return SimpleNamespace(**{name: bind(library, f"quire_{name}", argtypes) for name, argtypes in functions.items()})


class Recording(TorchDispatchMode):
    """`with Recording() as r: out = forward(…)`, then `r.tape(out, max_rows)`. Record at least two rows: torch calls any
    single row contiguous, and its wrappers would promise what others do not keep."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Callable, tuple]] = []
        self.buffers: list[Tensor] = []  # all that was allocated meanwhile, kept so that no address comes twice
        self.complete = True  # False once torch itself computed something

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would import its compiler for this, two seconds in the first answer

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
            self.complete = False
        return result

    def tape(self, output: Tensor, max_rows: int) -> "Tape | None":
        """The pass as a tape that can be played for up to `max_rows`; None if it cannot be repeated."""
        num_rows = len(output)
        same = all(
            arg == num_rows
            for function, args in self.calls
            for kind, arg in zip(function.argtypes, args)
            if kind is Rows
        )
        whole = all(len(buffer) == num_rows for buffer in self.buffers)
        return Tape(self, output, max_rows) if self.complete and same and whole else None


class Tape:
    """Calls with their arguments converted once, their buffers moved into one small arena."""

    def __init__(self, recording: Recording, output: Tensor, max_rows: int) -> None:
        starts = sorted(buffer.data_ptr() for buffer in recording.buffers)
        recorded = {buffer.data_ptr(): buffer.nbytes for buffer in recording.buffers}
        sizes = {start: num_bytes // len(output) * max_rows for start, num_bytes in recorded.items()}

        def owner(kind: type, argument: object) -> int | None:
            """The buffer a pointer argument lies in. Numbers are left alone, however large: a stride is no address."""
            if kind is not ctypes.c_void_p or argument is None:
                return None
            idx = bisect.bisect_right(starts, argument) - 1
            return starts[idx] if idx >= 0 and argument < starts[idx] + recorded[starts[idx]] else None

        places, arena_bytes = _pack(recording.calls, sizes, owner, keep=owner(ctypes.c_void_p, output.data_ptr()))
        self.arena = torch.empty(arena_bytes + _ALIGNMENT, dtype=torch.uint8)
        base = -(-self.arena.data_ptr() // _ALIGNMENT) * _ALIGNMENT
        self.rows = Rows(len(output))  # the very object all calls are given

        def converted(kind: type, argument: object) -> object:
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
    calls: list[tuple[Callable, tuple]],
    sizes: dict[int, int],
    owner: Callable[[type, object], int | None],
    keep: int | None,
) -> tuple[dict[int, int], int]:
    """Offsets in an arena: buffers whose lives (first to last call that names them) do not overlap share their place."""
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
            size, offset = -(-sizes[start] // _ALIGNMENT) * _ALIGNMENT, 0
            for taken, end, _ in alive:
                if taken - offset >= size:
                    break
                offset = max(offset, end)
            places[start] = offset
            bisect.insort(alive, (offset, offset + size, start))
            arena_bytes = max(arena_bytes, offset + size)
    return places, arena_bytes
