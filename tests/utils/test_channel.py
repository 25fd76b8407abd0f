"""Messages between machines reach those they are for, and are heard only from those who were told how."""

import secrets
import socket
import threading

import pytest
import zmq

from quire.utils.channel import ChannelClient, ChannelEnd, ChannelServer


@pytest.fixture(params=["127.0.0.1", "::1"])
def server(request):
    server = ChannelServer(request.param, 2)
    yield server
    server.close()


def connected(end: ChannelEnd) -> ChannelClient:
    client = ChannelClient(end)
    client.send(b"here")
    return client


def heard(server: ChannelServer, count: int) -> list[tuple[int, bytes]]:
    found: list[tuple[int, bytes]] = []
    while len(found) < count:
        more = server.receive(5)
        assert more, "nothing came"
        found += more
    return sorted(found)


def test_each_client_gets_every_message_and_is_known_by_its_number(server):
    clients = [connected(end) for end in server.ends]
    assert heard(server, 2) == [(0, b"here"), (1, b"here")]
    for message in (b"", b"step", secrets.token_bytes(3 << 20)):
        server.send(message)
        for client in clients:
            assert client.receive() == message
            client.send(message[::-1])
        assert heard(server, 2) == [(0, message[::-1]), (1, message[::-1])]
    for client in clients:
        client.close(1)


def test_what_was_said_last_arrives(server):
    def say() -> None:
        client = connected(server.ends[0])
        client.send(b"farewell")
        client.close(5)

    thread = threading.Thread(target=say)
    thread.start()
    assert heard(server, 2) == [(0, b"farewell"), (0, b"here")]
    thread.join()


def test_one_that_is_gone_is_told_of(server):
    clients = [connected(end) for end in server.ends]
    heard(server, 2)
    clients[1].close(0)
    with pytest.raises(ConnectionError, match="client 1"):
        for _ in range(10_000):
            server.send(b"step")
    clients[0].close(0)


def test_it_listens_at_one_address(server):
    address, _, port = server.ends[0].endpoint.removeprefix("tcp://").rpartition(":")
    assert address.strip("[]") in ("127.0.0.1", "::1")
    if address == "127.0.0.1":  # on Linux all of 127.0.0.0/8 is this machine
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", int(port)), 5)


def strangers(end: ChannelEnd) -> dict[str, ChannelEnd]:
    other_key, _ = zmq.curve_keypair()
    return {
        "no name": ChannelEnd(end.endpoint, end.server_key, secrets.token_bytes(16)),
        "no key": ChannelEnd(end.endpoint, other_key, end.name),
    }


@pytest.mark.parametrize("who", ["no name", "no key"])
def test_strangers_are_not_heard(server, who):
    stranger = connected(strangers(server.ends[0])[who])
    assert server.receive(0.3) == []
    client = connected(server.ends[0])
    assert heard(server, 1) == [(0, b"here")]
    stranger.close(0)
    client.close(0)


def test_nobody_takes_the_place_of_one_who_is_there(server):
    client = connected(server.ends[0])
    heard(server, 1)
    second = connected(server.ends[0])
    assert server.receive(0.3) == []
    with pytest.raises(ConnectionError):  # the other client never came
        server.send(b"step")
    assert client.receive() == b"step"
    second.close(0)
    client.close(0)


def test_without_encryption_there_is_no_way_in(server):
    context = zmq.Context()
    plain = context.socket(zmq.DEALER)
    plain.routing_id = server.ends[0].name
    plain.connect(server.ends[0].endpoint)
    plain.send(b"here")
    assert server.receive(0.3) == []
    context.destroy(linger=0)
