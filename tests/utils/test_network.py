"""Which address others reach this machine at follows the way to them."""

from quire.utils import network
from quire.utils.network import reachable_from


def test_on_this_machine_it_is_the_workers_own():
    assert reachable_from(["127.0.0.1", "127.0.0.1"]) == "127.0.0.1"
    assert reachable_from(["::1"]) == "::1"


def test_to_another_address_it_is_the_one_that_packets_come_from():
    assert reachable_from(["127.0.0.2"]) == "127.0.0.1"


def test_the_way_to_other_machines_counts_more_than_the_one_to_this(monkeypatch):
    ways = {"10.0.0.1": "10.0.0.1", "10.1.0.2": "10.1.0.1"}  # this machine has two addresses
    monkeypatch.setattr(network, "_source", ways.get)
    assert reachable_from(["10.0.0.1", "10.1.0.2"]) == "10.1.0.1"
