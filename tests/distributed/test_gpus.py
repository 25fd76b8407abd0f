"""Exchange between GPUs, as far as one card shows it: NCCL with a single rank.

Sums of processes that share a card: `benchmarks/shared_card.py`.
"""

import os

import pytest
import torch
import torch.distributed as dist

from quire.distributed import nccl
from quire.errors import ConfigError
from quire.utils.shared_memory import store_file

LOOPBACK = {"0100007F", "00000000000000000000000001000000"}  # as /proc writes it
LISTENING = "0A"


@pytest.fixture
def store():
    fd = store_file()
    yield fd
    os.close(fd)
    if dist.is_initialized():
        dist.destroy_process_group()


def listening_addresses() -> set[str]:
    """At which sockets of this process listen."""
    own = {os.readlink(entry.path) for entry in os.scandir("/proc/self/fd") if os.path.lexists(entry.path)}
    found = set()
    for table in ("tcp", "tcp6"):
        with open(f"/proc/self/net/{table}") as lines:
            for fields in (line.split() for line in list(lines)[1:]):
                if fields[3] == LISTENING and f"socket:[{fields[9]}]" in own:
                    found.add(fields[1].partition(":")[0])
    return found


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_nccl_is_recorded_in_a_graph_and_listens_on_the_loopback_interface_alone(store):
    before = listening_addresses()
    assert nccl.connect(store, 0, 1, 1).group.size == 1
    group = nccl.NcclGroup(dist.group.WORLD)
    x = torch.arange(1000.0, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        sums = group.sum(x * 2)
        whole = group.gather(sums.view(10, 100), [100])
    x += 1
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(sums, torch.arange(1.0, 1001.0, device="cuda") * 2)
    assert torch.equal(whole, sums.view(10, 100))
    assert listening_addresses() - before <= LOOPBACK


def test_more_workers_than_gpus_are_refused_with_a_sentence(store):
    count = torch.cuda.device_count()
    with pytest.raises(ConfigError, match=f"{count + 1} workers need as many GPUs, and {count} can be seen: lower"):
        nccl.connect(store, 0, count + 1, 1)
