"""A core on the fake executor, and the oracle that says what each request must get."""

import random
from collections import OrderedDict

from quire.config import EngineConfig
from quire.core.engine import Engine
from quire.kv.specs import CacheSpec, Full, Sliding
from quire.kv.tier import NoTier
from quire.messages import Abort, AddRequest
from quire.params import SamplingParams
from quire.step import StepPlan
from tests.core.fake import VOCAB_SIZE, FakeExecutor, next_token

FULL = {"full:kv": Full(1, 1, "bfloat16")}
HYBRID = {**FULL, "near:kv": Sliding(1, 1, "bfloat16", window=6), "nearer:kv": Sliding(1, 1, "bfloat16", window=5)}
DEFAULTS = {
    "max_model_len": 64,
    "block_size": 4,
    "num_gpu_blocks_override": 64,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "pipeline_depth": 1,
}
ALL_STOPS = tuple(range(0, VOCAB_SIZE, 5))  # about every fifth token ends an answer


class RecordingExecutor(FakeExecutor):
    """Keeps the plans it was given."""

    def __init__(self, config: EngineConfig, specs: dict[str, CacheSpec]) -> None:
        super().__init__(config, specs)
        self.plans: list[StepPlan] = []

    def forward(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        super().forward(plan)


class Core:
    """Adds requests, steps, collects tokens, and compares with the oracle; `kv.check()` after every step."""

    def __init__(
        self,
        specs: dict[str, CacheSpec] = FULL,
        tier: NoTier = NoTier(),
        executor: type[FakeExecutor] | None = None,
        **options,
    ) -> None:
        config = EngineConfig.from_kwargs(**{**DEFAULTS, **options})
        self.executor = (executor or RecordingExecutor)(config, specs)
        self.engine = Engine(config, self.executor, tier=tier)
        self.sent: dict[tuple[str, int], AddRequest] = {}
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.reasons: dict[tuple[str, int], str] = {}
        self.vectors: dict[str, list[float]] = {}
        self.steps: list = []

    def add(
        self,
        name: str,
        prompt: list[int],
        n: int = 1,
        eos: tuple[int, ...] = (),
        output_token_ids: list[int] = [],
        **fields,
    ) -> None:
        message_names = fields.keys() & {"priority", "cache_salt", "constraint", "wants_vector", "prediction", "owner"}
        message_fields = {name: fields.pop(name) for name in message_names}
        choices = {choice_idx: list(output_token_ids) for choice_idx in range(n)}
        params = SamplingParams(n=n, **fields)
        message = AddRequest(name, list(prompt), params, seed=7, choices=choices, eos_ids=list(eos), **message_fields)
        for choice_idx in choices:
            self.sent[name, choice_idx] = message
            self.tokens[name, choice_idx] = []
        self.engine.handle(message)

    def abort(self, name: str, choice_idx: int | None = None) -> None:
        self.engine.handle(Abort(name, choice_idx))

    def step(self) -> None:
        outputs = self.engine.step()
        self.steps.append(outputs)
        for delta in outputs.deltas:
            key = (delta.request_id, delta.choice_idx)
            assert key not in self.reasons, f"{key} got tokens after it finished"
            self.tokens[key] += delta.token_ids
            if delta.vector:
                self.vectors[delta.request_id] = delta.vector
            if delta.finish_reason:
                self.reasons[key] = delta.finish_reason
        self.engine.kv.check()

    def run(self, max_steps: int = 2000) -> None:
        for _ in range(max_steps):
            if not self.engine.has_work:
                return
            self.step()
        raise AssertionError("the core did not come to an end")

    def random_traffic(
        self,
        rng: random.Random,
        longest_shared: int = 24,
        vocab_size: int = 50,
        predicts: bool = False,
        prefix: str = "r",
    ) -> set[str]:
        """Requests with common beginnings, several choices, stops, aborts and preemptions, until all have ended.

        Returns the names of those that were aborted. `predicts`: most come with a prediction of their answer.
        """
        aborted = set()
        shared = [rng.randrange(vocab_size) for _ in range(longest_shared)]
        for idx in range(rng.randint(1, 12)):
            beginning = shared[: rng.randint(0, longest_shared)]
            prompt = beginning + [rng.randrange(vocab_size) for _ in range(rng.randint(1, 8))]
            self.add(
                f"{prefix}{idx}",
                prompt,
                prediction=nearly(answer_to(prompt, 30), rng) if predicts and rng.random() < 0.8 else [],
                n=rng.choice([1, 1, 1, 3]),
                max_tokens=rng.choice([1, 2, 9, 30, None]),
                eos=ALL_STOPS if rng.random() < 0.5 else (),
                min_tokens=rng.choice([0, 0, 1]),
                priority=rng.randint(0, 2),
                cache_salt=rng.choice(["", "", "salt"]),
            )
            for _ in range(rng.randint(0, 4)):
                self.step()
            if rng.random() < 0.2:
                victim = f"{prefix}{rng.randint(0, idx)}"
                if (victim, 0) not in self.reasons or self.sent[victim, 0].params.n > 1:
                    aborted.add(victim)
                self.abort(victim)
            if rng.random() < 0.2 and self.engine.scheduler.running:
                self.engine.scheduler._preempt(rng.choice(self.engine.scheduler.running))
                self.engine.kv.check()
        self.run()
        return aborted

    def expected(self, name: str, choice_idx: int = 0) -> list[int]:
        """The answer by the fake model's own definition, computed without any engine."""
        message = self.sent[name, choice_idx]
        prompt = message.prompt_token_ids
        params = message.params
        history = prompt + message.choices[choice_idx]
        limit = min(len(prompt) + (params.max_tokens or 10**9), self.engine.config.model.max_model_len)
        answer = []
        while len(history) < limit:
            token = next_token(history, message.seed, choice_idx)
            history = history + [token]
            answer.append(token)
            long_enough = len(history) - len(prompt) >= params.min_tokens
            stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(message.eos_ids))
            if long_enough and token in stops:
                break
        return answer

    def assert_all_as_expected(self, but: set[str] = frozenset()) -> None:
        for name, choice_idx in self.sent:
            if name not in but:
                assert self.tokens[name, choice_idx] == self.expected(name, choice_idx), (name, choice_idx)
                assert (name, choice_idx) in self.reasons

    def assert_nothing_is_held(self) -> None:
        for pool in self.engine.kv.pools:
            assert pool.num_free == pool.num_blocks - 1
        assert not self.engine.kv.live
        assert sorted(self.engine.scheduler.free_rows) == list(range(self.engine.config.scheduler.max_num_seqs))


def answer_to(prompt: list[int], count: int) -> list[int]:
    """What a first choice answers without stops."""
    history = list(prompt)
    for _ in range(count):
        history.append(next_token(history, 7, 0))
    return history[len(prompt) :]


def nearly(answer: list[int], rng: random.Random) -> list[int]:
    """With a few tokens changed, left out and put in."""
    found = []
    for token in answer:
        kind = rng.random()
        found += (
            [(token + 1) % VOCAB_SIZE] if kind < 0.1 else [] if kind < 0.15 else [3, token] if kind < 0.2 else [token]
        )
    return found


class ToyTier(NoTier):
    """Keeps the blocks that were evicted last. `wrong`: finds the content of another block instead."""

    def __init__(self, num_places: int, max_step_bytes: int = 1 << 20, wrong: bool = False) -> None:
        self.num_places = num_places
        self.max_step_bytes = max_step_bytes
        self.wrong = wrong
        self.places: dict[int, OrderedDict[tuple[int, bytes], int]] = {}  # per pool, the oldest first
        self.num_saved = 0
        self.num_found = 0

    def keep(self, pool_idx, group_idx, content_hash, loaded):
        kept = self.places.setdefault(pool_idx, OrderedDict())
        place = kept.pop((group_idx, content_hash), None)
        if place is None and len(kept) < self.num_places:
            place = len(kept)
        if place is None:
            oldest = next((key for key, where in kept.items() if (pool_idx, where) not in loaded), None)
            if oldest is None:
                return None
            place = kept.pop(oldest)
        kept[group_idx, content_hash] = place
        self.num_saved += 1
        return place

    def find(self, pool_idx, group_idx, content_hash):
        kept = self.places.get(pool_idx, {})
        place = kept.get((group_idx, content_hash))
        if place is None:
            return None
        self.num_found += 1
        return place if not self.wrong else (place + 1) % len(kept)
