"""Network interfaces and addresses of this machine: libraries that open sockets are told which to use.

Used by workers that exchange with other machines, and by the executor that they listen to.
"""

import fcntl
import socket
import struct

_SIOCGIFADDR = 0x8915
_ADDRESS_AT = 20  # in the kernel's answer


def interface_of(address: str) -> str | None:
    """The interface that has this IPv4 address; None: none has."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(asked, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has none
                continue
            if socket.inet_ntoa(answer[_ADDRESS_AT : _ADDRESS_AT + 4]) == address:
                return name
    return None


def reachable_from(addresses: list[str]) -> str:
    """The address of this machine at which those that have these reach it."""
    ours = [_source(address) for address in addresses]
    others = [own for own, address in zip(ours, addresses, strict=True) if own != address]  # of other machines
    return (others or ours)[0]


def _source(address: str) -> str:
    """From which packets to this address leave. Nothing is sent."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # any port
        return str(probe.getsockname()[0])
