"""Which address others reach this machine at follows the way to them."""

import socket

import pytest

from quire.utils.network import interface_of, reachable_from


def outer_address() -> str:
    """Of a route to elsewhere, if there is any."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no network")
        return probe.getsockname()[0]


def test_on_this_machine_it_is_the_workers_own():
    assert reachable_from(["127.0.0.1", "127.0.0.1"]) == "127.0.0.1"
    assert reachable_from(["::1"]) == "::1"


def test_with_workers_elsewhere_it_is_one_that_they_reach():
    own = outer_address()
    assert reachable_from([own]) == own
    assert reachable_from([own, "192.0.2.1"]) == own
    assert interface_of(own) not in (None, "lo")
