"""Ranks that exchange through sockets have the same bits as those that share memory, and listen where they are told."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from quire.distributed.gloo import GlooGroup, GlooLink
from quire.distributed.store import open_store, reach_store
from quire.errors import WorkerDied
from quire.ops.cpu.tape import Recording
from quire.utils.network import interface_of
from tests.distributed.rank import _part, _sum_of_parts
from tests.distributed.test_gpus import listening_addresses

ADDRESS = "127.0.0.1"


class Threads:
    """A rank in each of some threads: gloo neither knows nor minds."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.threads = ThreadPoolExecutor(count)
        self.store, self.port = open_store(ADDRESS)

    def of_rank(self, prefix: str) -> dist.Store:
        return dist.PrefixStore(prefix, reach_store(ADDRESS, self.port))

    def all(self, work, *rows) -> list:
        """What `work(rank, row of the rank in each of rows)` gives, by rank."""
        return list(self.threads.map(work, range(self.count), *rows))

    def groups(self, prefix: str) -> list[GlooGroup]:
        return self.all(lambda rank: GlooGroup(self.of_rank(prefix), ADDRESS, rank, self.count))


@pytest.fixture(scope="module")
def three():
    return Threads(3)


@pytest.fixture(scope="module")
def groups(three):
    return three.groups("three")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shape", [(1, 576), (3, 37), (1, 1), (0, 8), (5, 2, 9)])
def test_a_sum_is_that_of_the_parts_in_rank_order_on_every_rank(three, groups, dtype, shape):
    expected = _sum_of_parts(3, shape, dtype)
    for found in three.all(lambda rank: groups[rank].sum(_part(rank, shape, dtype))):
        assert found.dtype == expected.dtype and torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("widths", [[5, 3, 4], [7, 0, 1]])
@pytest.mark.parametrize("rows", [0, 1, 70])
def test_gather_puts_uneven_parts_side_by_side(three, groups, rows, widths, dtype):
    parts = [torch.randn(rows, width).to(dtype) for width in widths]
    for found in three.all(lambda rank: groups[rank].gather(parts[rank], widths)):
        assert torch.equal(found, torch.cat(parts, dim=1))


def test_a_part_of_another_width_is_refused(groups):
    with pytest.raises(ValueError, match="cannot be rank 0's part"):
        groups[0].gather(torch.zeros(1, 4), [5, 3, 4])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_link_brings_what_was_sent_in_order(dtype):
    two = Threads(2)
    links = two.all(lambda rank: GlooLink(two.of_rank("link"), ADDRESS, is_sender=rank == 0))
    sent = [torch.randn(rows, 33).to(dtype) for rows in (1, 0, 40)]
    received = [torch.empty_like(x) for x in sent]
    two.all(lambda rank: [(links[0].send if rank == 0 else links[1].receive)(x) for x in (sent, received)[rank]])
    assert all(torch.equal(one, other) for one, other in zip(sent, received))


def test_a_pass_with_such_a_sum_is_not_recorded():
    """A tape repeats compiled calls only: it would leave the exchange out."""
    two = Threads(2)
    groups = two.groups("tape")

    def recorded(rank: int) -> object:
        with Recording() as recording:
            out = groups[rank].sum(torch.ones(2, 8))
        return recording.tape(out, 4)

    assert two.all(recorded) == [None, None]


def test_whoever_waits_for_a_rank_that_is_gone_is_told():
    two = Threads(2)
    groups = two.groups("gone")
    two.all(lambda rank: groups[rank].sum(torch.ones(1)))
    groups.pop()
    with pytest.raises(WorkerDied, match="lost its connection"):
        groups[0].sum(torch.ones(1))


def test_nobody_listens_at_an_address_that_was_not_asked_for():
    before = listening_addresses()
    two = Threads(2)
    groups = two.groups("addresses")
    two.all(lambda rank: groups[rank].sum(torch.ones(1)))
    assert listening_addresses() - before <= {"0100007F"}


def test_keys_of_others_are_not_found(three):
    one, other = three.of_rank("one"), three.of_rank("other")
    one.set("key", b"value")
    assert one.check(["key"]) and not other.check(["key"])


def test_an_interface_is_found_by_its_address():
    assert interface_of(ADDRESS) == "lo"
    assert interface_of("203.0.113.7") is None
