"""What must hold of the model of many devices, whatever the figures are that it is given."""

from dataclasses import replace

import pytest
from benchmarks.cluster_model import (
    H200,
    LLAMA_405B,
    MEASURED,
    OFFLINE,
    Layout,
    Machine,
    Request,
    Shape,
    fits,
    loaded,
    lone,
    mixed256,
    run,
    shape,
)

ONE = Layout()


@pytest.fixture(scope="module")
def qwen() -> Shape:
    return shape("qwen3-8b")


def scaled(machine: Machine, factor: float) -> Machine:
    return replace(machine, weight_s=tuple((rows, each_s * factor) for rows, each_s in machine.weight_s))


def test_a_lone_request_never_beats_the_reading_of_its_weights(qwen: Shape) -> None:
    for tp in (1, 2, 4, 8):
        floor_s = (qwen.bytes - qwen.vocab * qwen.hidden * 2) / tp / 4.4e12  # rows of the embedding are few
        assert lone(H200, qwen, Layout(tp=tp), 128).tpot_s > floor_s


def test_every_request_gets_its_tokens_in_order(qwen: Shape) -> None:
    requests = [Request(100 * (i + 1), 5 + i) for i in range(12)]
    total_s = run(H200, qwen, Layout(tp=2, pp=2), requests, 4)
    assert [r.made for r in requests] == [r.output for r in requests]
    assert all(r.start_s < r.first_s < r.last_s <= total_s for r in requests)


def test_faster_memory_links_and_hosts_never_make_it_slower(qwen: Shape) -> None:
    layout = Layout(tp=2, pp=2)
    before = lone(H200, qwen, layout, 1024)
    better = [
        scaled(H200, 0.5),
        replace(H200, link_s=2 * H200.link_s),
        replace(H200, hop_bytes_s=2 * H200.hop_bytes_s),
        replace(H200, sum_s=H200.sum_s / 2),
        replace(H200, message_s=0.0),
        replace(H200, layer_s=0.0),
    ]
    for machine in better:
        after = lone(machine, qwen, layout, 1024)
        assert after.tpot_s <= before.tpot_s
        assert after.ttft_s <= before.ttft_s


def test_ranks_that_divide_layers_shorten_a_token_but_less_than_in_proportion(qwen: Shape) -> None:
    times = [lone(H200, qwen, Layout(tp=tp), 128).tpot_s for tp in (1, 2, 4, 8)]
    for one, two in zip(times, times[1:]):
        assert one / 2 < two < one


def test_stages_shorten_nothing_for_a_lone_request(qwen: Shape) -> None:
    assert lone(H200, qwen, Layout(pp=2), 128).tpot_s > lone(H200, qwen, ONE, 128).tpot_s


def test_stages_give_many_requests_more_but_at_most_in_proportion(qwen: Shape) -> None:
    one = loaded(H200, qwen, ONE, 128, 128, 64).tokens_s
    two = loaded(H200, qwen, Layout(pp=2), 256, 128, 64).tokens_s
    assert one < two < 2 * one


def test_two_engines_do_twice_as_much_in_the_same_time(qwen: Shape) -> None:
    one, two = (loaded(H200, qwen, Layout(dp=dp), 16, 256, 64) for dp in (1, 2))
    assert two.tokens_s == pytest.approx(2 * one.tokens_s)
    assert two.tpot_s == one.tpot_s


def test_engines_that_share_a_memory_do_less_than_twice_as_much(qwen: Shape) -> None:
    narrow = replace(H200, shared_memory_s=5e12)
    one, two = (loaded(narrow, qwen, Layout(dp=dp), 16, 256, 64).tokens_s for dp in (1, 2))
    assert one < two < 1.7 * one


def test_a_405b_model_needs_a_machine_of_eight_cards() -> None:
    assert not fits(LLAMA_405B, Layout(tp=4), 1, 1024)
    assert fits(LLAMA_405B, Layout(tp=8), 1, 1024)


@pytest.mark.parametrize("name", ["qwen3-0.6b", "qwen3-8b", "qwen3-30b-a3b"])
def test_one_card_is_reckoned_as_it_was_measured(name: str) -> None:
    *_, tpot_ms, tokens_s, _ = MEASURED[name]
    assert lone(OFFLINE, shape(name), ONE, 128).tpot_s * 1e3 == pytest.approx(tpot_ms, rel=0.15)
    assert mixed256(shape(name), ONE) == pytest.approx(tokens_s, rel=0.15)
