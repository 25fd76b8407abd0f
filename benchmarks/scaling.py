"""Costs that must not grow: planning with a long queue, prefix lookup in a full cache, detokenizing a long answer.

    python benchmarks/scaling.py

Each is timed at a small and a large size, alternating, best of several rounds; the ratio should stay under 1.5.
"""

import gc
import random
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from tests.core.fake import FakeExecutor  # noqa: E402

from quire.checkpoint.find import find  # noqa: E402
from quire.config import EngineConfig  # noqa: E402
from quire.core.engine import Engine  # noqa: E402
from quire.frontend.detokenize import Detokenizer  # noqa: E402
from quire.frontend.tokenizer import Tokenizer  # noqa: E402
from quire.kv.groups import form_layout  # noqa: E402
from quire.kv.manager import KVManager  # noqa: E402
from quire.kv.specs import Full  # noqa: E402
from quire.messages import AddRequest  # noqa: E402
from quire.params import SamplingParams  # noqa: E402

ROUNDS = 9


class SilentExecutor(FakeExecutor):
    """Answers at once with a fixed token, so that only the scheduler is timed."""

    def allocate(self, layout):
        self.groups = layout.groups

    def forward(self, plan):
        self.plan = plan

    def sample(self, plan, masks=None):
        from quire.step import StepResult

        class Done:
            def result(self):
                return StepResult(plan.step_id, [[5] if produces else [] for produces in plan.produces])

        return Done()


def planning_s(num_waiting: int) -> float:
    """Seconds per step with 64 requests running and `num_waiting` behind them."""
    config = EngineConfig.from_kwargs(
        max_model_len=2048,
        num_gpu_blocks_override=20_000,
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        pipeline_depth=1,
    )
    engine = Engine(config, SilentExecutor(config))
    for idx in range(64 + num_waiting):
        engine.handle(AddRequest(str(idx), [idx % 1000 + 1] * 16, SamplingParams(max_tokens=1500), seed=0))
    for _ in range(20):
        engine.step()
    gc.collect()
    started = time.perf_counter()
    for _ in range(200):
        engine.step()
    return (time.perf_counter() - started) / 200


def cache_of(num_blocks: int) -> tuple[KVManager, list[int]]:
    """A cache with `num_blocks` findable blocks; the prompt that is looked up is among them."""
    layout = form_layout({"layer:kv": Full(1, 1, "bfloat16")}, 16, num_blocks + 500)
    kv = KVManager(layout)
    rng = random.Random(0)
    prompts: list[list[int]] = []
    for _ in range(num_blocks // 100):
        prompt = [rng.randrange(50_000) for _ in range(16 * 100)]
        prompts.append(prompt)
        blocks = kv.open(prompt, "")
        kv.enter(blocks, 0)
        kv.grow(blocks, len(prompt))
        kv.advance(blocks, len(prompt), None)
        kv.release(blocks, None)
    return kv, prompts[len(prompts) // 2]


def lookup_s(kv: KVManager, prompt: list[int]) -> float:
    """Seconds per block found."""
    fresh = [kv.open(list(prompt), "") for _ in range(40)]
    started = time.perf_counter()
    for blocks in fresh:
        found = kv.find_prefix(blocks)
    elapsed = time.perf_counter() - started
    if found != len(prompt) - 16:
        raise SystemExit("the prompt was not found in the cache")
    return elapsed / 40 / (found // 16)


def detokenize_s(tokenizer: Tokenizer, token_ids: list[int], at: int) -> float:
    """Seconds per token, over the 100 tokens before the `at`-th."""
    detokenizer = Detokenizer(tokenizer)
    for token_id in token_ids[: at - 100]:
        detokenizer.feed((token_id,))
    started = time.perf_counter()
    for token_id in token_ids[at - 100 : at]:
        detokenizer.feed((token_id,))
    return (time.perf_counter() - started) / 100


def main() -> None:
    tokenizer = Tokenizer.from_files(find("smollm2"))
    sentence_ids = tokenizer.encode("The quick brown fox jumps over the lazy dog; naïve façade, 東京, 🦊. ")
    text_ids = (sentence_ids * 1000)[:10_000]
    caches = {size: cache_of(size) for size in (1_000, 100_000)}
    gc.disable()
    rows = [
        ("plan + apply, 64 running, per step", "waiting requests", 100, 10_000, planning_s),
        ("prefix lookup, per block", "cached blocks", 1_000, 100_000, lambda size: lookup_s(*caches[size])),
        ("detokenize, per token", "tokens so far", 100, 10_000, lambda at: detokenize_s(tokenizer, text_ids, at)),
    ]
    print(f"{'what':<36} {'size':<18} {'small':>16} {'large':>16} {'ratio':>6}")
    for what, unit, small, large, measure in rows:
        best = {small: float("inf"), large: float("inf")}
        for _ in range(ROUNDS):
            for size in best:
                best[size] = min(best[size], measure(size))
        cells = [f"{best[size] * 1e6:.2f} µs @{size:,}" for size in (small, large)]
        print(f"{what:<36} {unit:<18} {cells[0]:>16} {cells[1]:>16} {best[large] / best[small]:>6.2f}")


if __name__ == "__main__":
    main()
