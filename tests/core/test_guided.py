"""Answers that follow a grammar, on the fake executor: masks, forced tokens, waiting for a grammar, in any schedule."""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.core.guides import Guides
from quire.errors import RequestError
from quire.messages import AddRequest, Constraint, Thinking, Vocabulary
from quire.params import SamplingParams
from quire.structured.engines.base import Matcher
from quire.structured.spec import GrammarSpec
from tests.core.fake import VOCAB_SIZE, hidden_state, next_token
from tests.core.harness import FULL, HYBRID, Core
from tests.core.test_drafts import NUM_DRAFTS, Drafting

EOS = 999
# What opens and closes thinking: START, or START and START_B; END_A and END_B.
START, START_B = 990, 993
END_A, END_B = 991, 992
VOCABULARY = Vocabulary([b"x"] * VOCAB_SIZE, [EOS], [EOS], VOCAB_SIZE)


class Sums(Matcher):
    """A toy language: the text says how many tokens are possible at each place; which ones depends on all before."""

    def __init__(self, text: str) -> None:
        super().__init__(VOCABULARY)
        self.widths = [int(width) for width in text.split()]
        self.seen: list[int] = []
        self.slow = False

    @property
    def too_slow(self) -> bool:
        return self.slow

    is_complete = terminated = property(lambda self: EOS in self.seen)

    def rollback(self, count: int) -> None:
        del self.seen[len(self.seen) - count :]

    def allowed(self) -> list[int]:
        at = len(self.seen)
        if at >= len(self.widths):
            return [EOS] if EOS not in self.seen else []
        if self.widths[at] == 0:
            raise RuntimeError("the engine fails here")
        first = (sum(self.seen) * 7 + at) % 90
        allowed = list(range(first, first + self.widths[at]))
        return allowed + [START, START_B] if self.widths[at] == 2 else allowed

    def _accept(self, token_id: int) -> bool:
        fits = token_id in self.allowed()
        if fits:
            self.seen.append(token_id)
        return fits

    def _fill(self, words) -> None:
        words[:] = 0
        for token_id in self.allowed():
            words.view("uint32")[token_id // 32] |= 1 << token_id % 32


@dataclass
class Compiled:
    text: str
    polls: int = 0
    grammar: "Compiled | None" = None
    error: RequestError | None = None

    @property
    def done(self) -> bool:
        self.polls -= 1
        return self.polls < 0

    def wait(self, timeout_s: float) -> None:
        pass

    def matcher(self) -> Sums:
        return Sums(self.text)


class Slow:
    """A grammar is compiled after the core has looked for it `polls` times."""

    def __init__(self, polls: int = 0) -> None:
        self.polls = polls

    def submit(self, spec: GrammarSpec) -> Compiled:
        ticket = Compiled(spec.text, self.polls)
        ticket.grammar = ticket
        if "bad" in spec.text:
            ticket.error = RequestError("this grammar is bad")
        return ticket

    def close(self) -> None:
        pass


class GuidedDrafting(Drafting):
    """Guesses what each answer will be, two times of three; what it guesses beyond that is 0."""

    def __init__(self, config, specs) -> None:
        super().__init__(config, specs)
        self.answers: dict[tuple[tuple[int, ...], int], list[int]] = {}  # by prompt and choice

    def draft(self, state) -> list[int]:
        history = state.token_ids
        for (prompt, choice_idx), answer in self.answers.items():
            if choice_idx == state.choice_idx and history[: len(prompt)] == list(prompt):
                rest = answer[len(history) - len(prompt) :][:NUM_DRAFTS]
                guessed = [token + ((sum(history) + place) % 3 == 0) for place, token in enumerate(rest)]
                return guessed + [0] * (NUM_DRAFTS - len(guessed))
        return [0] * NUM_DRAFTS

    def _run(self, plan, masks):
        result = super()._run(plan, masks)
        if plan.tells_drafts:
            pairs = zip(plan.rows, plan.produces)
            result.drafts = [list(self.rows[row].drafts) if produces > 0 else [] for row, produces in pairs]
        return result


def guided(polls: int = 0, **options) -> Core:
    core = Core(**options)
    core.engine.guides = guides = Guides(VOCABULARY, Slow(polls), core.executor)
    core.engine.pipeline.late_inputs = guides
    return core


def oracle(core: Core, name: str, text: str, choice_idx: int = 0, thinking: Thinking | None = None) -> list[int]:
    """The answer, chosen token by token, without an engine and without knowing that any token is forced."""
    message = core.sent[name, choice_idx]
    history = list(message.prompt_token_ids)
    sums = Sums(text)
    answer: list[int] = []
    is_open = thinking is not None and thinking.is_open
    thought: list[int] = []
    start = thinking.start_ids if thinking is not None and not is_open else []
    opening = 0  # how many tokens of `start` were written
    may_answer = True  # whether these may also be the beginning of the answer
    limit = min(len(history) + message.params.max_tokens, core.engine.config.model.max_model_len)
    while len(history) < limit:
        if is_open:
            allowed = [token_id for token_id in range(VOCAB_SIZE) if token_id != EOS]
            if thinking.budget is not None and len(thought) >= thinking.budget:
                allowed = [END_B] if thought[-1:] == [END_A] else [END_A]
        else:
            allowed = sums.allowed() if may_answer else []
            if opening < len(start) and opening == len(answer):
                allowed = sorted({*allowed, start[opening]})
        token = next_token(history, message.seed, choice_idx, allowed)
        may_open = opening < len(start) and opening == len(answer)
        history.append(token)
        answer.append(token)
        if is_open:
            thought.append(token)
            is_open = thought[-2:] != [END_A, END_B]
        elif may_open and token == start[opening]:
            opening += 1
            may_answer = may_answer and sums.accept(token)
            if opening == len(start):
                is_open = may_answer = True
                sums = Sums(text)
        else:
            sums.accept(token)
            if token == EOS:
                break
    return answer


def constraint(text: str, thinking: Thinking | None = None) -> Constraint:
    return Constraint(GrammarSpec("grammar", text), thinking)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_grammar_rules_every_token_and_ends_the_answer(depth):
    core = guided(pipeline_depth=depth)
    core.add("a", [1, 2, 3], max_tokens=30, eos=(EOS,), constraint=constraint("40 3 7 800"))
    core.add("free", [1, 2, 3], max_tokens=9)
    core.run()
    assert core.tokens["a", 0] == oracle(core, "a", "40 3 7 800")
    assert core.tokens["a", 0][-1] == EOS and core.reasons["a", 0] == "stop"
    assert core.tokens["free", 0] == core.expected("free")
    core.assert_nothing_is_held()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_request_that_wants_a_vector_has_no_use_for_a_grammar(depth):
    core = guided(pipeline_depth=depth)
    core.add("a", [1, 2, 3], max_tokens=30, eos=(EOS,), constraint=constraint("40 3 7 800"))
    core.step()
    core.add("vector", [5, 6, 7], constraint=constraint("3 7"), wants_vector=True)
    core.run()
    assert core.vectors["vector"] == hidden_state([5, 6, 7])
    assert core.tokens["a", 0] == oracle(core, "a", "40 3 7 800")


@pytest.mark.parametrize("depth", [1, 2])
def test_forced_tokens_cost_no_steps(depth):
    text = "5" + " 1" * 20 + " 5"
    core = guided(pipeline_depth=depth)
    core.add("a", [1, 2, 3], max_tokens=40, eos=(EOS,), constraint=constraint(text))
    core.run()
    assert core.tokens["a", 0] == oracle(core, "a", text)
    assert len(core.steps) < 10  # of 23 tokens


def test_a_request_waits_for_its_grammar_and_holds_nobody_up():
    core = guided(polls=5)
    core.add("slow", [1, 2, 3], max_tokens=4, eos=(EOS,), constraint=constraint("9 9 9 9 9"))
    core.add("fast", [1, 2, 3], max_tokens=4)
    for _ in range(4):
        core.step()
    assert core.reasons == {("fast", 0): "length"}
    core.run()
    assert core.tokens["slow", 0] == oracle(core, "slow", "9 9 9 9 9") and core.reasons["slow", 0] == "length"


def test_a_grammar_that_is_no_good_is_told_and_a_waiting_request_can_be_aborted():
    core = guided(polls=2)
    core.add("bad", [1, 2, 3], max_tokens=4, constraint=constraint("bad"))
    core.add("left", [1, 2, 3], max_tokens=4, constraint=constraint("9 9"))
    core.abort("left")
    core.run()
    assert core.reasons == {("bad", 0): "error"}
    assert [delta.error for outputs in core.steps for delta in outputs.deltas] == ["this grammar is bad"]
    core.assert_nothing_is_held()


def test_a_restarted_request_goes_on_where_its_grammar_was():
    text = "50 2 1 1 1 60 3"
    core = guided()
    core.add("a", [1, 2, 3], max_tokens=30, eos=(EOS,), constraint=constraint(text))
    core.run()
    whole = core.tokens["a", 0]
    for cut in range(1, len(whole) - 1):
        again = guided(pipeline_depth=2)
        again.add("a", [1, 2, 3], max_tokens=30, eos=(EOS,), output_token_ids=whole[:cut], constraint=constraint(text))
        again.run()
        assert whole[:cut] + again.tokens["a", 0] == whole


def test_asking_for_logprobs_forces_nothing():
    core = guided()
    core.add("a", [1, 2, 3], max_tokens=30, eos=(EOS,), logprobs=0, constraint=constraint("5" + " 1" * 9))
    core.run()
    assert len(core.steps) >= 11
    assert core.tokens["a", 0] == oracle(core, "a", "5" + " 1" * 9)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("at", [0, 1, 3, 12])
def test_an_engine_that_fails_ends_its_own_request_only(depth, at):
    core = guided(pipeline_depth=depth)
    core.add("failing", [1, 2, 3], max_tokens=30, constraint=constraint("9 " * at + "0"))
    core.add("other", [1, 2, 3], max_tokens=20, eos=(EOS,), constraint=constraint("9 " * 18))
    core.run()
    assert core.reasons == {("failing", 0): "error", ("other", 0): "stop"}
    assert core.tokens["other", 0] == oracle(core, "other", "9 " * 18)
    core.assert_nothing_is_held()


def test_a_grammar_that_costs_too_much_ends_its_own_request_only():
    core = guided()
    core.add("slow", [1, 2, 3], max_tokens=30, constraint=constraint("9 9 9 9 9 9"))
    core.add("other", [1, 2, 3], max_tokens=8)
    core.step()
    core.engine.scheduler.requests["slow", 0].guide.matcher.slow = True
    core.run()
    assert core.reasons == {("slow", 0): "error", ("other", 0): "length"}
    assert core.tokens["other", 0] == core.expected("other")
    core.assert_nothing_is_held()


@dataclass
class Asked:
    """A request with a grammar."""

    prompt_len: int
    max_tokens: int
    text: str
    n: int
    thinking: Thinking | None
    errors: set[int] | None  # places at which its prediction is wrong; None: it has none


WIDTHS = st.lists(st.sampled_from([1, 1, 1, 2, 30, 700]), min_size=1, max_size=25)
THINKING = st.builds(
    Thinking,
    is_open=st.booleans(),
    start_ids=st.sampled_from([[START], [START, START_B]]),
    end_ids=st.just([END_A, END_B]),
    budget=st.integers(0, 4),
)
REQUEST = st.builds(
    Asked,
    prompt_len=st.integers(1, 20),
    max_tokens=st.integers(1, 30),
    text=WIDTHS.map(lambda widths: " ".join(map(str, widths))),
    n=st.integers(1, 2),
    thinking=st.none() | THINKING,
    errors=st.none() | st.sets(st.integers(0, 20), max_size=4),
)


@settings(max_examples=150, deadline=None)
@given(
    requests=st.lists(REQUEST, min_size=1, max_size=6),
    depth=st.integers(1, 2),
    blocks=st.integers(40, 70),
    budget=st.integers(4, 24),
    polls=st.integers(0, 3),
    specs=st.sampled_from([FULL, HYBRID]),
    method=st.sampled_from([None, "drafts", "suffix"]),
)
def test_no_schedule_changes_an_answer(requests, depth, blocks, budget, polls, specs, method):
    options = dict(pipeline_depth=depth, num_gpu_blocks_override=blocks, max_num_batched_tokens=budget, max_num_seqs=4)
    options["speculative_config"] = {"method": "suffix"} if method == "suffix" else None
    options["executor"] = GuidedDrafting if method == "drafts" else None
    core = guided(polls, specs=specs, **options)
    wanted = {}
    for idx, asked in enumerate(requests):
        name = f"r{idx}"
        rule = constraint(asked.text, asked.thinking)
        prompt = list(range(asked.prompt_len))
        params = SamplingParams(n=asked.n, max_tokens=asked.max_tokens)
        message = AddRequest(name, prompt, params, seed=7)
        for choice_idx in range(asked.n):
            core.sent[name, choice_idx] = message
            wanted[name, choice_idx] = oracle(core, name, asked.text, choice_idx, asked.thinking)
            if method == "drafts":
                core.executor.answers[tuple(prompt), choice_idx] = wanted[name, choice_idx]
        predicted = []
        if asked.errors is not None:
            answer = wanted[name, 0]
            predicted = [token + (place in asked.errors) for place, token in enumerate(answer)]
        core.add(
            name,
            prompt,
            n=asked.n,
            max_tokens=asked.max_tokens,
            eos=(EOS,),
            constraint=rule,
            prediction=predicted,
        )
    core.run()
    for key, answer in wanted.items():
        assert core.tokens[key] == answer, key
    core.assert_nothing_is_held()


@pytest.mark.parametrize("depth", [1, 2])
def test_answers_of_other_requests_are_looked_up_too(depth):
    text = "30 " * 30
    core = guided(pipeline_depth=depth, speculative_config={"method": "suffix"})
    for name in "ab":
        core.add(name, [1, 2, 3], max_tokens=40, eos=(EOS,), constraint=constraint(text))
        core.run()
        assert core.tokens[name, 0] == oracle(core, name, text)
    assert sum(core.engine.stats().accepted_drafts) > 10


@pytest.mark.parametrize("depth", [1, 2])
def test_drafts_of_the_workers_are_verified_with_a_mask_at_every_place(depth):
    text = "30 " * 12 + "1 " * 6 + "30 " * 12
    thinking = Thinking(is_open=True, start_ids=[START], end_ids=[END_A, END_B], budget=7)
    core = guided(pipeline_depth=depth, executor=GuidedDrafting)
    expected = {}
    for name, prompt, rule in (("plain", [1, 2, 3], None), ("thinks", [4, 5], thinking)):
        core.add(name, prompt, max_tokens=50, eos=(EOS,), constraint=constraint(text, rule))
        expected[name] = core.executor.answers[tuple(prompt), 0] = oracle(core, name, text, thinking=rule)
    core.run()
    for name, answer in expected.items():
        assert core.tokens[name, 0] == answer, name
    stats = core.engine.stats()
    assert stats.num_draft_tokens > sum(stats.accepted_drafts) > 15
    core.assert_nothing_is_held()


@pytest.mark.parametrize("depth", [1, 2])
def test_predictions_are_verified_with_a_mask_at_every_place(depth):
    """Right ones are accepted several at a time; one that the grammar refuses is not even tried."""
    text = "30 " * 30
    core = guided(pipeline_depth=depth)
    core.add("a", [1, 2, 3], max_tokens=40, eos=(EOS,), constraint=constraint(text))
    core.run()
    answer = core.tokens["a", 0]
    core.add("b", [1, 2, 3], max_tokens=40, eos=(EOS,), constraint=constraint(text), prediction=answer)
    num_steps = len(core.steps)
    core.run()
    assert core.tokens["b", 0] == answer == oracle(core, "b", text)
    assert len(core.steps) - num_steps < 16
    core.add("c", [1, 2, 3], max_tokens=40, eos=(EOS,), constraint=constraint(text), prediction=[999] * 30)
    num_drafts = core.engine.stats().num_draft_tokens
    core.run()
    assert core.tokens["c", 0] == answer and core.engine.stats().num_draft_tokens == num_drafts
