"""A core on the fake executor, and the oracle that says what each request must get."""

from quire.config import EngineConfig
from quire.core.engine import Engine
from quire.executor.fake import FakeExecutor, next_token
from quire.kv.specs import Full, KVSpec, Sliding
from quire.messages import Abort, AddRequest
from quire.params import SamplingParams

FULL = {"full": Full(1, 1, 2)}
HYBRID = {"full": Full(1, 1, 2), "near": Sliding(1, 1, 2, window=6), "sunk": Sliding(1, 1, 2, window=5, sinks=3)}


class Core:
    """Adds requests, steps, collects tokens, and compares with the oracle; `kv.check()` after every step."""

    def __init__(self, specs: dict[str, KVSpec] = FULL, **options) -> None:
        options = {
            "max_model_len": 64, "block_size": 4, "num_gpu_blocks_override": 64, "max_num_seqs": 4,
            "max_num_batched_tokens": 16, "pipeline_depth": 1, **options,
        }  # fmt: skip
        config = EngineConfig.from_kwargs(**options)
        self.executor = FakeExecutor(config, specs)
        self.engine = Engine(config, self.executor)
        self.sent: dict[tuple[str, int], AddRequest] = {}
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.reasons: dict[tuple[str, int], str] = {}
        self.steps: list = []

    def add(
        self, name: str, prompt: list[int], n: int = 1, eos: tuple[int, ...] = (), output_token_ids: list[int] = [], **fields
    ) -> None:
        message_fields = {k: fields.pop(k) for k in ("priority", "cache_salt", "constraint") if k in fields}
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
            if delta.finish_reason:
                self.reasons[key] = delta.finish_reason
        self.engine.kv.check()

    def run(self, max_steps: int = 2000) -> None:
        for _ in range(max_steps):
            if not self.engine.has_work:
                return
            self.step()
        raise AssertionError("the core did not come to an end")

    def expected(self, name: str, choice_idx: int = 0) -> list[int]:
        """The answer by the fake model's own definition, computed without any engine."""
        message = self.sent[name, choice_idx]
        prompt, given, params = message.prompt_token_ids, message.choices[choice_idx], message.params
        history = prompt + given
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
        pool = self.engine.kv.pool
        assert pool.num_free == pool.num_blocks - 1
        assert not self.engine.kv.live
        assert sorted(self.engine.scheduler.free_rows) == list(range(self.engine.config.scheduler.max_num_seqs))
