"""Network interfaces of this machine, by address: libraries that open sockets are told which to use.

Used by workers that exchange with other machines.
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
