"""The store in which ranks on several machines find each other: torch's, on a socket that we bound ourselves.

torch would listen on all interfaces, whatever it is told. It asks nobody for a secret either: keys have a random
prefix that came another way, and the network must be private (docs/multi-node.md). Values are never unpickled.
"""

import datetime
import socket

import torch.distributed as dist

TIMEOUT = datetime.timedelta(minutes=5)  # for all ranks to come


def open_store(address: str) -> tuple[dist.TCPStore, int]:
    """The store, which lives as long as the object, and its port at this address alone."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 0), family=family)
    port = listener.getsockname()[1]
    fd = listener.detach()  # it is the store's now
    store = dist.TCPStore(
        address, port, is_master=True, timeout=TIMEOUT, wait_for_workers=False, master_listen_fd=fd, use_libuv=True
    )
    return store, port


def reach_store(address: str, port: int) -> dist.TCPStore:
    """The store of another rank."""
    return dist.TCPStore(address, port, is_master=False, timeout=TIMEOUT, wait_for_workers=False, use_libuv=True)
