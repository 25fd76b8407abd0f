"""Processes that exchange tensors through shared memory: right to the last bit, whoever comes late."""

import fcntl
import os
import signal
import subprocess
import sys
import tempfile
import time

import pytest

from quire.distributed.shared_memory import SharedMemoryGroup, SharedMemoryLink
from quire.ops.ranks import cpu
from quire.utils import shared_memory
from quire.utils.shared_memory import Layout, group_memory, link_memory, sealed_memory
from tests.distributed.rank import SLOT_BYTES, Ranks

pytestmark = pytest.mark.skipif(not cpu.available(), reason="no compiler")


@pytest.fixture(scope="module")
def ranks():
    with Ranks(3) as ranks:
        yield ranks


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shape", [(1, 576), (3, 37), (1, 1), (0, 8), (5, 2, 9)])
def test_a_sum_is_that_of_the_parts_in_rank_order_on_every_rank(ranks, size, dtype, shape):
    for out, expected in ranks.all("sums", size, shape=shape, dtype=dtype):
        assert out == expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_message_larger_than_a_slot_goes_in_pieces(ranks, dtype):
    for out, expected in ranks.all("sums", 3, shape=(7, SLOT_BYTES // 2 + 5), dtype=dtype):
        assert out == expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_several_threads_add_the_same(ranks, dtype):
    for out, expected in ranks.all("sums", 2, shape=(301, 577), dtype=dtype, threads=3):
        assert out == expected


@pytest.mark.parametrize("late", [0, 1, 2])
def test_whoever_comes_late_is_waited_for(ranks, late):
    for out, expected in ranks.all("sums", 3, shape=(2, 3000), dtype="bfloat16", late=late):
        assert out == expected


def test_infinities_and_nan_stay_what_they_are(ranks):
    for numbers in ranks.all("special", 2):
        inf = float("inf")
        assert numbers[0::5] == [inf] * 4
        assert all(number != number for number in numbers[1::5] + numbers[2::5])
        assert numbers[3::5] == [inf] * 4  # 6e38
        assert [str(number) for number in numbers[4::5]] == ["-0.0"] * 4


@pytest.mark.parametrize("size, count", [(2, 20_000), (3, 5_000)])
def test_thousands_of_sums_in_a_row(ranks, size, count):
    assert ranks.all("rounds", size, count=count) == [count] * size


def test_a_tape_repeats_a_sum_for_any_number_of_rows(ranks):
    for results in ranks.all("replay", 2, width=200, rows=[1, 2, 33, 5]):
        assert all(out == expected for out, expected in results)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("widths", [[5, 3, 4], [7, 0, 1], [2000, 2500, 1]])
@pytest.mark.parametrize("rows", [1, 70])
def test_gather_puts_uneven_parts_side_by_side(ranks, rows, widths, dtype):
    assert ranks.all("gathers", 3, rows=rows, widths=widths, dtype=dtype) == [True] * 3


def test_gather_takes_parts_of_wider_rows(ranks):
    assert ranks.all("gathers", 2, rows=9, widths=[6, 3], dtype="float32", is_strided=True) == [True] * 2


@pytest.mark.parametrize("pauses", [(0, 0), (0.002, 0), (0, 0.002)])
def test_a_link_keeps_order_and_content(ranks, pauses):
    shapes = [(1, 576), (3, 5), (9, 3000), (1, 1)] * 10
    ranks.ask(1, "receives", shapes=shapes, pause_s=pauses[1])
    ranks.ask(0, "sends", shapes=shapes, pause_s=pauses[0])
    assert ranks.answer(1) is True
    ranks.answer(0)


def test_sending_waits_for_the_receiver_only_when_the_ring_is_full(ranks):
    shapes = [(2, 8)] * shared_memory.LINK_SLOTS
    ranks.ask(0, "sends", shapes=shapes)
    assert ranks.has_answered(0, within_s=30)
    ranks.answer(0)
    ranks.ask(0, "sends", shapes=[(1, 1)])
    assert not ranks.has_answered(0, within_s=0.3)
    ranks.ask(1, "receives", shapes=shapes)
    assert ranks.answer(1) is True
    ranks.answer(0)
    ranks.ask(1, "receives", shapes=[(1, 1)])
    assert ranks.answer(1) is True


def test_a_rank_that_is_stopped_for_seconds_is_waited_for_without_using_the_cpu(ranks):
    stopped = ranks.processes[1]
    os.kill(stopped.pid, signal.SIGSTOP)
    try:
        ranks.ask(0, "timed_sum", size=2)
        ranks.ask(1, "timed_sum", size=2)
        assert not ranks.has_answered(0, within_s=2.5)
    finally:
        os.kill(stopped.pid, signal.SIGCONT)
    total, seconds, cpu_seconds = ranks.answer(0)
    assert total == ranks.answer(1)[0] == 2
    assert seconds > 2.4 and cpu_seconds < 0.1


def test_a_rank_stopped_in_its_sleep_goes_on(ranks):
    ranks.ask(0, "timed_sum", size=2)
    time.sleep(0.2)
    os.kill(ranks.processes[0].pid, signal.SIGSTOP)
    ranks.ask(1, "timed_sum", size=2)
    assert ranks.answer(1)[0] == 2
    os.kill(ranks.processes[0].pid, signal.SIGCONT)
    assert ranks.answer(0)[0] == 2


def test_memory_is_not_inherited_and_cannot_be_resized():
    for fd in (group_memory(2, 4096), link_memory(4096)):
        assert not os.get_inheritable(fd)
        for num_bytes in (0, 1 << 30):
            with pytest.raises(OSError):
                os.ftruncate(fd, num_bytes)
        os.close(fd)


@pytest.mark.parametrize("size, slot_bytes", [(0, 4096), (-1, 4096), (2, 0), (2, 100), (2, -64)])
def test_memory_of_impossible_sizes_is_not_made(size, slot_bytes):
    with pytest.raises(ValueError):
        group_memory(size, slot_bytes)


def header(layout: Layout) -> bytes:
    return shared_memory._HEADER.pack(layout.kind, layout.num_flags, layout.num_slots, layout.slot_bytes)


def wrong_memory(case: str) -> int:
    layout = Layout(shared_memory.GROUP, 2, 4, 4096)
    if case == "null":
        return os.open(os.devnull, os.O_RDWR)
    if case == "file":
        with tempfile.TemporaryFile() as file:
            file.write(header(layout).ljust(layout.num_bytes, b"\0"))
            file.flush()
            return os.dup(file.fileno())
    if case == "not sealed":
        fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, layout.num_bytes)
    else:
        num_bytes = {"empty": 0, "no header": 16, "too small": layout.num_bytes - 64}.get(case, layout.num_bytes)
        fd = sealed_memory("test", num_bytes)
    if case not in ("zeros", "empty", "no header"):
        sizes = {"too many slots": (2, 1 << 62, 4096), "huge slots": (2, 4, 1 << 63)}.get(case, (2, 4, 4096))
        os.pwrite(fd, header(Layout(shared_memory.GROUP, *sizes)), 0)
    return fd


@pytest.mark.parametrize(
    "case",
    ["null", "file", "not sealed", "empty", "no header", "too small", "zeros", "too many slots", "huge slots"],
)
def test_memory_that_is_not_what_it_should_be_is_refused(case):
    fd = wrong_memory(case)
    with pytest.raises(ValueError, match="no shared memory of ours"):
        SharedMemoryGroup(fd, 0, 2)
    os.close(fd)


def test_memory_of_another_kind_or_size_is_refused():
    group, link = group_memory(2, 4096), link_memory(4096)
    for make in (
        lambda: SharedMemoryGroup(link, 0, 2),
        lambda: SharedMemoryLink(group),
        lambda: SharedMemoryGroup(group, 0, 3),
        lambda: SharedMemoryGroup(group, 2, 2),
        lambda: SharedMemoryGroup(group, -1, 2),
        lambda: SharedMemoryGroup(-1, 0, 2),
    ):
        with pytest.raises(ValueError):
            make()
    SharedMemoryGroup(group, 1, 2)
    assert fcntl.fcntl(group, fcntl.F_GETFD) >= 0  # it is still the caller's to close
    os.close(group)
    os.close(link)


def test_without_a_compiler_one_sentence_says_what_to_install():
    program = (
        "from quire.distributed.shared_memory import SharedMemoryGroup; from quire.errors import ConfigError\n"
        "try: SharedMemoryGroup(-1, 0, 2)\n"
        "except ConfigError as error: print(error)"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "QUIRE_NATIVE": "0"}, capture_output=True, text=True
    )
    assert "install g++" in run.stdout, run.stderr
