"""A ring of messages in shared memory: one process writes, others read, each at its own pace.

Between an executor and its workers, which get its descriptors. How many bytes were written, and read, is counted by
eventfds, two for each reader, on which whoever has nothing to do sleeps. A count passes through the kernel, and so
comes after the bytes that it counts, on any CPU. Knows bytes, not what they mean.
"""

import mmap
import os
import select
import struct
from collections.abc import Callable

import msgspec

from quire.errors import ConfigError, EngineError
from quire.utils.shared_memory import sealed_memory

RING_BYTES = 1 << 20
_HEADER = struct.Struct("<I?")  # before each piece of a message: its length, and whether it is the last


class RingFds(msgspec.Struct, frozen=True, array_like=True):
    """The descriptors of a ring, or of one reader's end of it; whoever opened them closes them."""

    memory: int
    written: tuple[int, ...]  # eventfds, one per reader: bytes that it may read
    released: tuple[int, ...]  # likewise: bytes that it has read, and the writer may use again

    @classmethod
    def open(cls, num_readers: int, num_bytes: int = RING_BYTES) -> "RingFds":
        if not hasattr(os, "eventfd"):
            raise ConfigError("workers in processes of their own need Linux: leave --distributed-executor-backend out")
        memory = sealed_memory("qu.ring", num_bytes)
        counters = [os.eventfd(0, os.EFD_CLOEXEC) for _ in range(2 * num_readers)]
        return cls(memory, tuple(counters[:num_readers]), tuple(counters[num_readers:]))

    def end(self, reader: int) -> "RingFds":
        return RingFds(self.memory, (self.written[reader],), (self.released[reader],))

    def all(self) -> list[int]:
        return [self.memory, *self.written, *self.released]


class _End:
    def __init__(self, fds: RingFds) -> None:
        self._memory = mmap.mmap(fds.memory, 0)
        self._size = len(self._memory)
        self._position = 0  # in all that was ever written

    def close(self) -> None:
        """The descriptors stay open."""
        self._memory.close()


class RingWriter(_End):
    def __init__(self, fds: RingFds) -> None:
        super().__init__(fds)
        self._written = fds.written
        self._readers = {fd: reader for reader, fd in enumerate(fds.released)}
        self._room = [self._size] * len(fds.released)  # that each reader leaves, as far as it has told
        self._piece_bytes = self._size // 4 - _HEADER.size
        self._poll = select.poll()
        for fd in fds.released:
            self._poll.register(fd, select.POLLIN)

    def write(self, message: bytes, wait: Callable[[], None] | None = None) -> None:
        """For all readers. Where the ring is full, `wait` is called, which returns when a reader may have read.

        It sleeps until one of `RingFds.released` can be read; without it, this is done here.
        """
        rest = memoryview(message)
        while True:
            piece, rest = rest[: self._piece_bytes], rest[self._piece_bytes :]
            self._write(_HEADER.pack(len(piece), not rest) + piece, wait)
            if not rest:
                return

    def _write(self, data: bytes, wait: Callable[[], None] | None) -> None:
        while min(self._room) < len(data):
            if wait is not None:
                wait()
            self._count_room(None if wait is None else 0)
        start = self._position % self._size
        until_end = self._size - start
        self._memory[start : start + min(len(data), until_end)] = data[:until_end]
        if len(data) > until_end:
            self._memory[: len(data) - until_end] = data[until_end:]
        self._position += len(data)
        for reader, fd in enumerate(self._written):
            self._room[reader] -= len(data)
            os.eventfd_write(fd, len(data))

    def _count_room(self, timeout_ms: int | None) -> None:
        for fd, _ in self._poll.poll(timeout_ms):
            reader = self._readers[fd]
            self._room[reader] += os.eventfd_read(fd)
            if self._room[reader] > self._size:
                raise _damaged()


class RingReader(_End):
    def __init__(self, fds: RingFds) -> None:
        super().__init__(fds)
        self._written, self._released = fds.written[0], fds.released[0]
        self._parts: list[bytes] = []  # of a message that is not complete
        self._unreleased = 0  # bytes read that the writer was not told of: telling it costs a call

    def wait(self) -> list[bytes]:
        """Sleeps until something was written; the messages that are complete now, maybe none.

        `RingFds.written` can be read when it will not sleep.
        """
        num_new = os.eventfd_read(self._written)
        if num_new > self._size:
            raise _damaged()
        messages = []
        end = self._position + num_new
        while self._position < end:
            size, is_last = _HEADER.unpack(self._take(_HEADER.size, end))
            self._parts.append(self._take(size, end))
            if is_last:
                messages.append(b"".join(self._parts))
                self._parts = []
        self._unreleased += num_new
        # A piece takes a quarter of the ring at most: the writer never waits for what is held back here.
        if self._unreleased >= self._size // 4:
            os.eventfd_write(self._released, self._unreleased)
            self._unreleased = 0
        return messages

    def _take(self, size: int, end: int) -> bytes:
        if size > end - self._position:
            raise _damaged()
        start = self._position % self._size
        data = self._memory[start : start + size]
        if len(data) < size:
            data += self._memory[: size - len(data)]
        self._position += size
        return data


def _damaged() -> EngineError:
    return EngineError("what came through shared memory cannot be read: this is a bug, or the memory is damaged")
