"""Messages between one process and others on any machine: zmq over TCP, encrypted.

Between an executor and its workers on a cluster, as `ring.py` on one machine. One process listens, at one address. To
be heard one needs its public key, which is never sent here, and a name that cannot be guessed: both come to the others
by a way that is trusted already (`ChannelEnd`). Knows bytes, not what they mean.
"""

import errno
import secrets

import msgspec
import zmq


class ChannelEnd(msgspec.Struct, frozen=True, array_like=True):
    """What one of the others needs."""

    endpoint: str
    server_key: bytes
    name: bytes


class ChannelServer:
    def __init__(self, address: str, num_clients: int) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.router_mandatory = True  # else what is sent to one that is not there would be dropped
        server_key, secret_key = zmq.curve_keypair()
        self._socket.curve_server = True
        self._socket.curve_publickey, self._socket.curve_secretkey = server_key, secret_key
        self._socket.ipv6 = ":" in address
        self._socket.bind(f"tcp://[{address}]:0" if ":" in address else f"tcp://{address}:0")
        endpoint = self._socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0")
        self._names = [secrets.token_bytes(16) for _ in range(num_clients)]
        self._clients = {name: client for client, name in enumerate(self._names)}
        self.ends = [ChannelEnd(endpoint, server_key, name) for name in self._names]

    def send(self, message: bytes) -> None:
        """To all, each of which has sent something before. ConnectionError: one cannot be reached."""
        for client, name in enumerate(self._names):
            try:
                self._socket.send_multipart([name, message])
            except zmq.ZMQError as error:
                if error.errno != errno.EHOSTUNREACH:
                    raise
                raise ConnectionError(f"client {client} is not connected") from None

    def receive(self, timeout_s: float) -> list[tuple[int, bytes]]:
        """What has come, and from whom; sleeps if there is nothing, but not for longer than this."""
        received: list[tuple[int, bytes]] = []
        if not self._socket.poll(int(timeout_s * 1000)):
            return received
        while True:
            try:
                name, *parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return received
            if name in self._clients and len(parts) == 1:
                received.append((self._clients[name], parts[0]))

    def close(self) -> None:
        self._socket.close()
        self._context.term()


class ChannelClient:
    def __init__(self, end: ChannelEnd) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.routing_id = end.name
        self._socket.curve_serverkey = end.server_key
        self._socket.curve_publickey, self._socket.curve_secretkey = zmq.curve_keypair()
        self._socket.ipv6 = "[" in end.endpoint
        self._socket.connect(end.endpoint)

    def send(self, message: bytes) -> None:
        self._socket.send(message)

    def receive(self) -> bytes:
        return self._socket.recv()

    def close(self, timeout_s: float) -> None:
        """Gives what was sent this long to leave."""
        self._socket.close(linger=int(timeout_s * 1000))
        self._context.term()
