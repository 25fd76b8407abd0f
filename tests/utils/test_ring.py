"""A ring gives every reader all messages, whole and in order, however they wrap around."""

import contextlib
import os
import select
import struct
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.errors import EngineError
from quire.utils.ring import RingFds, RingReader, RingWriter

SMALL = 4096


@contextlib.contextmanager
def ring(num_readers: int = 1, num_bytes: int = SMALL):
    fds = RingFds.open(num_readers, num_bytes)
    writer, readers = RingWriter(fds), [RingReader(fds.end(reader)) for reader in range(num_readers)]
    try:
        yield fds, writer, readers
    finally:
        for end in (writer, *readers):
            end.close()
        for fd in fds.all():
            os.close(fd)


def message(idx: int, size: int) -> bytes:
    return bytes((idx + place) % 251 for place in range(size))


def is_readable(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))


@settings(max_examples=100)
@given(sizes=st.lists(st.integers(0, 3 * SMALL), max_size=40), num_readers=st.integers(1, 3), data=st.data())
def test_every_reader_gets_all_messages_in_order(sizes, num_readers, data):
    messages = [message(idx, size) for idx, size in enumerate(sizes)]
    with ring(num_readers) as (fds, writer, readers):
        got = [[] for _ in readers]

        def read() -> None:
            """Some readers read what there is: at least one of those that have something, while the writer waits."""
            able = [idx for idx in range(num_readers) if is_readable(fds.written[idx])]
            for idx in data.draw(st.lists(st.sampled_from(able), min_size=1, unique=True)):
                got[idx] += readers[idx].wait()

        for each in messages:
            writer.write(each, read)
        for idx, reader in enumerate(readers):
            if is_readable(fds.written[idx]):
                got[idx] += reader.wait()
    assert got == [messages] * num_readers


def test_readers_at_other_paces_get_what_a_writer_in_another_thread_sends():
    messages = [message(idx, idx * 37 % 9000) for idx in range(300)]
    with ring(3) as (_, writer, readers):
        got = [[] for _ in readers]

        def read(idx: int) -> None:
            while len(got[idx]) < len(messages):
                got[idx] += readers[idx].wait()
                time.sleep(idx * 0.0005)

        threads = [threading.Thread(target=read, args=(idx,)) for idx in range(3)]
        for thread in threads:
            thread.start()
        for each in messages:
            writer.write(each)
        for thread in threads:
            thread.join(60)
    assert got == [messages] * 3


def test_whoever_waits_sleeps():
    with ring() as (_, writer, (reader,)):
        got = []
        thread = threading.Thread(target=lambda: got.extend(reader.wait()))
        before = time.process_time()
        thread.start()
        time.sleep(0.3)
        used_s = time.process_time() - before
        writer.write(b"now")
        thread.join(10)
    assert got == [b"now"]
    assert used_s < 0.1


def test_an_error_of_whoever_waits_reaches_the_writer():
    def died() -> None:
        raise EngineError("nobody reads")

    with ring() as (_, writer, _), pytest.raises(EngineError, match="nobody reads"):
        while True:
            writer.write(bytes(500), died)


@pytest.mark.parametrize("damage", ["a length beyond what was written", "more than fits", "more read than written"])
def test_damage_is_noticed(damage):
    with ring() as (fds, writer, (reader,)):
        writer.write(b"fine")
        assert reader.wait() == [b"fine"]
        if damage == "more read than written":
            os.eventfd_write(fds.released[0], 1 << 40)
            with pytest.raises(EngineError, match="shared memory"):
                while True:
                    writer.write(bytes(900), lambda: None)
        if damage == "more than fits":
            os.eventfd_write(fds.written[0], 1 << 40)
        else:
            os.pwrite(fds.memory, struct.pack("<I?", 1 << 31, True), 9)
            os.eventfd_write(fds.written[0], 100)
        with pytest.raises(EngineError, match="shared memory"):
            reader.wait()
