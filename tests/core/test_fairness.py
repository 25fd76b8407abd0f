"""Who is admitted when several owners wait: the one who had the fewest tokens in the last minute."""

import random

import pytest

from quire.core.request import Request, Status
from quire.core.waiting import POLICIES, TokenUse, WaitingQueue
from quire.messages import AddRequest
from quire.params import SamplingParams
from tests.core.harness import Core


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def admitted(core: Core) -> list[str]:
    """Names of requests in the order in which they got their first row."""
    scheduler = core.engine.scheduler
    names = []
    start_row = scheduler._start_row

    def noted(step, request, num_cached):
        if request.num_preemptions == 0:
            names.append(request.request_id)
        start_row(step, request, num_cached)

    scheduler._start_row = noted
    return names


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_one_request_does_not_wait_behind_two_hundred_of_another_key(depth, policy):
    core = Core(pipeline_depth=depth, scheduling_policy=policy)
    order = admitted(core)
    for idx in range(204):
        core.add(f"a{idx}", [1, 2, 3], max_tokens=6, owner="A")
    for _ in range(5):
        core.step()
    num_before = len(order)
    assert len(core.engine.scheduler.waiting) >= 196
    core.add("b", [4, 5, 6], max_tokens=6, owner="B")
    core.run()
    assert "b" in order[num_before : num_before + 2]
    core.assert_all_as_expected()


def test_two_keys_that_send_alike_are_served_alike():
    core = Core(max_num_seqs=1)
    order = admitted(core)
    for idx in range(10):
        core.add(f"a{idx}", [idx, 2, 3], max_tokens=4, owner="A")
    for idx in range(10):
        core.add(f"b{idx}", [idx, 5, 6], max_tokens=4, owner="B")
    core.run()
    for num in range(2, 20, 2):
        assert sum(name.startswith("a") for name in order[:num]) == num // 2
    assert [name for name in order if name.startswith("a")] == [f"a{idx}" for idx in range(10)]


def test_long_answers_count_while_they_run():
    """A's one request generates much and B's many little: B's are admitted first until B had as much."""
    clock = Clock()
    core = Core(max_num_seqs=2, max_model_len=64, enable_prefix_caching=False)
    core.engine.scheduler.waiting.clock = clock
    order = admitted(core)
    core.add("long", [1, 2, 3], max_tokens=60, owner="A")
    for _ in range(30):
        core.step()
        clock.now_s += 0.1
    core.add("a1", [1, 2, 3], max_tokens=2, owner="A")
    for idx in range(4):
        core.add(f"b{idx}", [1, 2, 3, 4, 5, 6], max_tokens=2, owner="B")
    for _ in range(20):
        core.step()
        clock.now_s += 0.1
    assert order == ["long", "b0", "b1", "b2", "b3", "a1"]
    core.run()
    core.assert_all_as_expected()


def test_what_was_computed_a_minute_ago_is_forgotten():
    use = TokenUse()
    use.add(5, 100)
    use.add(7, 100)
    use.add(11, 130)
    totals = []
    for second in (130, 159, 160, 189, 190):
        use.expire(second)
        totals.append(use.total)
    assert totals == [23, 23, 11, 11, 0]


def test_owners_who_have_gone_are_forgotten():
    clock = Clock()
    queue = WaitingQueue(clock)
    for idx in range(100):
        old = request(f"r{idx}", (0, idx), f"owner{idx}")
        queue.push(old)
        queue.charge(old, 0)
        queue.remove(old, Status.FINISHED)
    clock.now_s += 61
    for idx, owner in enumerate("AB"):
        queue.push(request(owner, (0, 100 + idx), owner))
    queue.settle_now_and_then([])
    assert set(queue._uses) == {"A", "B"}


def test_cached_tokens_are_not_charged():
    core = Core(num_gpu_blocks_override=64)
    core.add("first", list(range(20)), max_tokens=2, owner="A")
    core.run()
    core.add("again", list(range(20)), max_tokens=2, owner="B")
    core.run()
    waiting = core.engine.scheduler.waiting
    assert waiting._uses["A"].total == 22
    assert waiting._uses["B"].total == 22 - 16


def test_priority_comes_before_fairness():
    core = Core(max_num_seqs=1, scheduling_policy="priority")
    order = admitted(core)
    core.add("busy", [1, 2, 3], max_tokens=9, owner="A")
    core.step()
    core.add("poor", [1, 2], max_tokens=2, owner="B", priority=5)
    core.add("urgent", [3, 4], max_tokens=2, owner="A", priority=1)
    core.run()
    assert order == ["busy", "urgent", "poor"]


def test_a_preempted_request_comes_before_those_of_poorer_keys():
    core = Core(max_num_seqs=2)
    core.add("a0", [1, 2, 3], max_tokens=20, owner="A")
    core.add("a1", [4, 5, 6], max_tokens=20, owner="A")
    core.step()
    core.step()
    core.add("b", [7, 8], max_tokens=2, owner="B")
    core.engine.scheduler._preempt(core.engine.scheduler.running[-1])
    assert core.engine.scheduler.waiting.peek().request_id == "a1"
    core.run()
    core.assert_all_as_expected()


def test_with_owners_and_all_kinds_of_traffic_everybody_gets_the_right_answer():
    for seed in range(30):
        rng = random.Random(seed)
        policy = rng.choice(["fcfs", "priority"])
        core = Core(num_gpu_blocks_override=20, scheduling_policy=policy, pipeline_depth=rng.choice([1, 2]))
        add = core.add
        core.add = lambda *args, **fields: add(*args, owner=rng.choice("ABC"), **fields)  # noqa: B023
        aborted = core.random_traffic(rng)
        for name, choice_idx in core.sent:
            if name not in aborted:
                assert core.tokens[name, choice_idx] == core.expected(name, choice_idx)
        assert len(core.engine.scheduler.waiting) == 0 and not core.engine.scheduler.waiting._lines


# -- one owner ---------------------------------------------------------------------------------------------------------


def request(name: str, key: tuple[int, int], owner: str = "") -> Request:
    message = AddRequest(name, [1, 2], SamplingParams(max_tokens=4), seed=1, owner=owner)
    made = Request(message, 0, message.params, 64)
    made.key = key
    return made


def test_a_single_owners_order_is_that_of_the_policy():
    rng = random.Random(3)
    for policy in POLICIES.values():
        queue = WaitingQueue()
        waiting: list[Request] = []
        for idx in range(400):
            action = rng.random()
            if action < 0.5 or not waiting:
                new = request(f"r{idx}", (0, idx))
                new.priority = rng.randint(0, 3)
                new.key = policy(new, idx)
                queue.push(new)
                waiting.append(new)
            elif action < 0.8:  # admitted, and perhaps preempted again
                head = queue.peek()
                assert head is min(waiting, key=lambda one: one.key)
                queue.remove(head, Status.RUNNING)
                waiting.remove(head)
                if rng.random() < 0.3:
                    head.num_preemptions += 1
                    queue.push(head)
                    waiting.append(head)
            else:
                gone = rng.choice(waiting)
                queue.remove(gone, Status.FINISHED)
                waiting.remove(gone)
            assert len(queue) == len(waiting)
            assert queue.peek() is (min(waiting, key=lambda one: one.key) if waiting else None)


def test_equal_use_is_decided_by_arrival():
    queue = WaitingQueue()
    for idx, owner in enumerate("CBA"):
        queue.push(request(owner, (0, idx), owner))
    assert queue.peek().request_id == "C"
