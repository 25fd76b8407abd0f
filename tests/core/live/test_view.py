"""What those who watch the engine are shown: it is right and bounded, tells no secrets, costs nothing unwatched."""

import json
import random
import time

import pytest

from quire.config import EngineConfig
from quire.core.engine import Engine
from quire.core.live import view as view_module
from quire.core.live.blocks import NOBODY
from quire.core.live.steps import TimedExecutor
from quire.messages import AddRequest, ResetPrefixCache, Watch
from quire.params import SamplingParams
from tests.core.harness import HYBRID, Core


def watched(**options) -> Core:
    core = Core(**options)
    core.engine.handle(Watch(True))
    return core


def shown(core: Core, after_s: float = 0.0) -> dict:
    """An update; `after_s`: as if so much more time had passed."""
    core.engine.live.prefixes.forget_encoded()
    return json.loads(core.engine.live.update(time.monotonic() + after_s))


def rows(update: dict) -> list[dict]:
    table = update["requests"]
    return [dict(zip(table["columns"], row)) for row in table["rows"]]


def nodes(update: dict) -> list[dict]:
    return [dict(zip(update["prefix"]["columns"], node)) for node in update["prefix"]["nodes"]]


def test_nothing_is_recorded_while_nobody_watches():
    core = Core()
    core.add("a", [1, 2, 3], max_tokens=4)
    core.run()
    assert core.engine.live is None and core.engine.live_update() is None
    assert core.engine.pipeline.executor is core.executor


def test_the_last_watcher_takes_everything_with_it():
    core = watched()
    assert isinstance(core.engine.pipeline.executor, TimedExecutor)
    core.add("a", [1, 2, 3], max_tokens=4)
    core.step()
    core.engine.handle(Watch(False))
    core.engine.handle(Watch(False))
    assert core.engine.live is None and core.engine.pipeline.executor is core.executor
    core.run()
    core.assert_all_as_expected()
    core.engine.handle(Watch(True))
    assert shown(core)["steps"]["count"] == 0


def test_watching_again_while_watched_keeps_what_was_recorded():
    core = watched()
    core.add("a", [1, 2, 3], max_tokens=4)
    core.step()
    core.engine.handle(Watch(True))
    assert shown(core)["steps"]["count"] == 1


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("specs", [None, HYBRID])
@pytest.mark.parametrize("seed", range(3))
def test_requests_get_the_same_answers_watched_or_not(depth, specs, seed):
    options = {"specs": specs} if specs else {}
    core = watched(pipeline_depth=depth, num_gpu_blocks_override=48, max_num_seqs=5, **options)
    but = core.random_traffic(random.Random(seed))
    core.assert_all_as_expected(but)
    core.assert_nothing_is_held()
    update = shown(core)
    assert update["counts"]["running"] == update["counts"]["waiting"] == 0
    assert (
        not core.engine.live.tracks.live and not core.engine.live.prefilling and not core.engine.live.executor.launched
    )


def test_phases_and_progress_are_those_of_the_scheduler():
    core = watched(max_num_seqs=2)
    core.add("a", [1] * 5, max_tokens=9)
    core.add("b", [2] * 30, max_tokens=3)
    core.add("c", [3] * 4, max_tokens=7)
    core.step()
    update = shown(core)
    a, b, c = rows(update)
    assert [row["phase"] for row in (a, b, c)] == ["decode", "prefill", "queued"]
    assert (a["prompt"], a["computed"], a["output"], a["max_output"]) == (5, 5, 1, 9)
    assert (b["prompt"], b["computed"], b["output"], b["max_output"]) == (30, 11, 0, 3)
    assert (c["computed"], c["blocks"]) == (0, 0)
    assert (a["blocks"], b["blocks"]) == (2, 3)
    assert update["counts"]["running"] == 2 and update["counts"]["waiting"] == 1
    core.run()
    ended = rows(shown(core))
    assert [row["phase"] for row in ended] == ["ended"] * 3
    assert {row["id"] for row in ended} == {row["id"] for row in (a, b, c)}
    assert {row["output"] for row in ended} == {9, 3, 7}


def test_steps_say_how_many_tokens_were_prompt_and_how_many_answer():
    core = watched()
    core.add("a", [1] * 5, max_tokens=4)
    core.add("b", [2] * 20, max_tokens=2)  # in chunks of 11 and 9
    core.run()
    steps = shown(core)["steps"]
    assert steps["prefill"] == [16, 9, 0, 0] and steps["decode"] == [0, 1, 2, 1]
    assert steps["rows"] == [2, 2, 2, 1] and steps["count"] == 4
    assert all(time_ms >= 0 for name in ("host_ms", "device_ms") for time_ms in steps[name])


def test_a_last_chunk_of_one_token_is_still_prompt():
    core = watched()
    core.add("a", [1] * 17, max_tokens=2)  # 16 and 1
    core.run()
    assert shown(core)["steps"]["prefill"] == [16, 1, 0]


def test_history_is_in_points_of_half_a_second_and_rates_are_of_the_last_two_seconds():
    core = watched()
    core.add("a", [1] * 8, max_tokens=5)
    core.run()
    history = shown(core, after_s=1.1)["history"]
    assert history["interval_s"] == 0.5
    assert sum(history["prefill"]) == 8 and sum(history["decode"]) == 4 and sum(history["steps"]) == 5
    assert len({len(column) for name, column in history.items() if name != "interval_s"}) == 1
    rates = shown(core, after_s=1.2)["rates"]
    assert rates["prefill_tokens_s"] == pytest.approx(8 / (len(history["prefill"]) * 0.5))
    assert shown(core, after_s=30)["rates"] == {"prefill_tokens_s": 0, "decode_tokens_s": 0, "steps_s": 0}
    assert len(shown(core, after_s=500)["history"]["prefill"]) == 120


def test_blocks_of_the_map_add_up_and_belong_to_those_who_hold_them():
    core = watched(num_gpu_blocks_override=64)
    core.add("a", [1] * 10, max_tokens=6)
    core.add("b", [2] * 6, max_tokens=6)
    core.step()
    update = shown(core)
    (pool,) = update["kv"]["pools"]
    assert pool["blocks"] == 63 == pool["free"] + pool["cached"] + pool["owned"]
    assert pool["owned"] == sum(pool["cells"]["owned"]) == sum(row["blocks"] for row in rows(update)) == 5
    tables = [request.blocks.tables[0] for request in core.engine.scheduler.running]
    for cell, owner in enumerate(pool["cells"]["owner"]):
        held = [idx for idx, table in enumerate(tables) if cell + 1 in table]
        assert owner == (held[0] if held else NOBODY)
    core.run()
    (pool,) = shown(core)["kv"]["pools"]
    assert pool["owned"] == 0 and pool["cached"] == sum(pool["cells"]["cached"]) > 0
    assert pool["blocks"] == pool["free"] + pool["cached"]
    core.engine.handle(ResetPrefixCache())
    assert shown(core)["kv"]["pools"][0]["cached"] == 0


def test_a_large_pool_has_few_cells_that_are_all_looked_at_in_time():
    core = watched(num_gpu_blocks_override=50_001)
    core.add("a", [1] * 40, max_tokens=20)
    while core.engine.has_work:
        core.engine.step()
    core.add("b", [2] * 40, max_tokens=20)
    for _ in range(5):
        core.engine.step()
    (pool,) = shown(core)["kv"]["pools"]
    for _ in range(round(pool["refresh_s"] / 0.25)):
        (pool,) = shown(core)["kv"]["pools"]
    assert len(pool["cells"]["owned"]) <= 400 and pool["cell_blocks"] * len(pool["cells"]["owned"]) >= 50_000
    assert sum(pool["cells"]["owned"]) == pool["owned"] == 11
    assert pool["free"] + pool["cached"] + pool["owned"] == 50_000 and pool["cached"] > 0


def test_the_prefix_tree_has_common_beginnings_and_their_hits():
    core = watched()
    shared = list(range(100, 108))  # two blocks
    core.add("a", shared + [1] * 4 + [9], max_tokens=1)
    core.run()
    core.add("b", shared + [2] * 4 + [9], max_tokens=1)
    core.add("c", shared + [2] * 4 + [9], max_tokens=1)
    core.run()
    found = {(node["tokens"], node["requests"], node["hits"], node["hit_tokens"]): node for node in nodes(shown(core))}
    assert sorted(found) == [(4, 1, 0, 0), (4, 2, 0, 0), (8, 3, 2, 16)]
    top = found[8, 3, 2, 16]
    assert top["parent"] == 0 and {node["parent"] for node in found.values()} == {0, top["id"]}
    assert all(node["cached"] for node in found.values())
    core.engine.handle(ResetPrefixCache())
    assert not any(node["cached"] for node in nodes(shown(core)))


def test_what_was_cached_before_anybody_watched_is_a_node_of_its_own():
    core = Core()
    core.add("a", list(range(100, 110)), max_tokens=1)
    core.run()
    core.engine.handle(Watch(True))
    core.add("b", list(range(100, 110)) + [1] * 7, max_tokens=1)
    core.run()
    first, second = nodes(shown(core))
    assert (first["tokens"], first["hits"], first["hit_tokens"]) == (8, 1, 8)
    assert (second["tokens"], second["hits"], second["parent"]) == (8, 0, first["id"])


def test_the_tree_keeps_those_used_last_and_parents_come_first():
    core = watched(num_gpu_blocks_override=2000, max_num_seqs=16, max_num_batched_tokens=512)
    rng = random.Random(0)
    for idx in range(300):
        core.add(f"r{idx}", [rng.randrange(3) for _ in range(4)] * 2 + [idx, idx // 7, 3, 4, 5], max_tokens=1)
    core.run()
    found = nodes(shown(core))
    assert len(found) == 200 and len({node["id"] for node in found}) == 200
    seen = {0}
    for node in found:
        assert node["parent"] in seen
        seen.add(node["id"])


def test_a_timeline_tells_of_queue_chunks_decode_and_preemption():
    core = watched(max_num_seqs=2, num_gpu_blocks_override=16, max_model_len=56)
    core.add("a", [1] * 20, max_tokens=30)
    core.add("b", [2] * 8, max_tokens=30)
    for _ in range(60):
        core.step()
        if shown(core)["counts"]["preemptions"]:
            break
    update = shown(core)
    preempted = next(row for row in rows(update) if row["phase"] == "preempted")
    assert preempted["preemptions"] == 1 and preempted["blocks"] == 0
    kinds = [entry[0] for entry in preempted["timeline"]]
    assert kinds == ["queue", "prefill", "decode", "preempt", "queue"]
    times = [time_s for entry in preempted["timeline"] for time_s in entry[1:3]]
    assert times == sorted(times) and times[-1] == pytest.approx(update["now_s"], abs=0.002)
    chunks = [entry[3] for entry in rows(update)[0]["timeline"] if entry[0] == "prefill"]
    assert chunks == [16, 4]
    core.run()
    core.assert_all_as_expected()
    ended = next(row for row in rows(shown(core)) if row["id"] == preempted["id"])
    assert [entry[0] for entry in ended["timeline"]][5:] == ["prefill", "prefill", "decode", "end"]
    assert sum(shown(core, after_s=1)["history"]["preemptions"]) == 1


def test_a_request_that_ran_before_anybody_watched_is_shown_from_then_on():
    core = Core()
    core.add("a", [1] * 5, max_tokens=20)
    for _ in range(3):
        core.step()
    core.engine.scheduler.running[0].arrival -= 2
    core.engine.handle(Watch(True))
    core.step()
    (row,) = rows(shown(core))
    assert row["phase"] == "decode" and row["output"] == 4 and row["arrived_s"] == pytest.approx(-2, abs=0.5)
    assert [entry[0] for entry in row["timeline"]] == ["queue", "decode"]


def test_a_long_prompts_chunks_are_joined_so_that_a_timeline_stays_short():
    core = watched(max_model_len=1024, num_gpu_blocks_override=600)
    core.add("a", [1] * 900, max_tokens=20)
    core.run()
    (row,) = rows(shown(core))
    chunks = [entry[3] for entry in row["timeline"] if entry[0] == "prefill"]
    assert len(row["timeline"]) <= 16 and sum(chunks) == 900
    assert [entry[0] for entry in row["timeline"]][-2:] == ["decode", "end"]


def test_siblings_that_wait_for_their_prompt_are_parked():
    core = watched()
    core.add("a", [1] * 30, n=3, max_tokens=2)
    core.step()
    assert [row["phase"] for row in rows(shown(core))] == ["prefill", "parked", "parked"]
    core.run()
    core.assert_all_as_expected()


def test_guessed_tokens_are_counted():
    core = watched()
    core.add("a", [1, 2, 3], max_tokens=6)
    core.step()
    assert shown(core)["speculation"] is None
    answer = core.expected("a")
    core.add("b", [1, 2, 3], max_tokens=6, prediction=answer)
    core.run()
    speculation = shown(core, after_s=1)["speculation"]
    stats = core.engine.scheduler.stats
    assert speculation["draft_tokens"] == stats.num_draft_tokens > 0
    assert speculation["accepted"] == sum(speculation["by_place"]) == sum(stats.accepted_drafts) > 0
    assert speculation["acceptance"] == speculation["recent_acceptance"] > 0


def test_many_requests_with_all_there_is_to_tell_fit_into_an_update():
    options = {"max_num_seqs": 100, "max_num_batched_tokens": 100, "block_size": 4, "num_gpu_blocks_override": 99_999}
    engine = Engine(EngineConfig.from_kwargs(executor="echo", max_model_len=2048, pipeline_depth=1, **options))
    engine.handle(Watch(True))
    for idx in range(160):
        params = SamplingParams(max_tokens=1000)
        engine.handle(AddRequest(f"r{idx}", [idx, idx // 3] + [1] * 100, params, seed=0))
    while len(engine.scheduler.running) < 100:
        engine.step()
    for idx in range(130):
        engine.step()
        body = engine.live.update(time.monotonic() + idx / 2)
        assert len(body) <= view_module.MAX_BYTES
    update = json.loads(body)
    assert update["requests"]["left_out"] == [100 - 64, 60 - 16] and len(update["requests"]["rows"]) == 64 + 16
    assert len(update["prefix"]["nodes"]) > 60 and len(update["history"]["prefill"]) == 120


def test_what_is_too_long_is_shortened_until_it_fits_and_shown_again_later(monkeypatch):
    core = watched(max_model_len=1024, num_gpu_blocks_override=600)
    core.add("a", [1] * 200, max_tokens=200)
    for _ in range(40):
        core.step()
    whole = len(core.engine.live.update(time.monotonic()))
    monkeypatch.setattr(view_module, "MAX_BYTES", whole - 100)
    (row,) = rows(shown(core))
    assert 1 <= len(row["timeline"]) <= 4 and row["timeline"][-1][0] == "decode"
    monkeypatch.undo()
    for _ in range(view_module.TRY_LONGER * len(view_module.SHORTER)):
        (row,) = rows(shown(core))
    assert len(row["timeline"]) > 4


def test_no_token_hash_or_name_of_a_request_is_shown():
    core = watched(max_model_len=64)
    core.add("secret-name", [987_654] * 20, max_tokens=30, cache_salt="secret-salt", owner="secret-owner")
    for _ in range(8):
        core.step()
    body = core.engine.live.update(time.monotonic()).decode()
    assert "secret" not in body and "987654" not in body
    chain = core.engine.scheduler.running[0].blocks.chains[4]
    assert chain.hashes
    assert not any(content_hash.hex()[:8] in body for content_hash in chain.hashes)


def test_updates_come_four_times_a_second_and_an_idle_core_wakes_up_for_them(monkeypatch):
    core = watched()
    live = core.engine.live
    now = live.origin
    monkeypatch.setattr(view_module.time, "monotonic", lambda: now)
    times = []
    for _ in range(200):
        if core.engine.live_update() is not None:
            times.append(round(now - live.origin, 2))
        assert 1 <= live.wait_ms(1000) <= 251
        now += 0.01
    assert times == [pytest.approx(0.25 * idx, abs=0.011) for idx in range(8)]
    now += 3  # a long step
    assert core.engine.live_update() is not None and core.engine.live_update() is None


def test_what_cannot_be_shown_hurts_no_request(monkeypatch, caplog):
    core = watched()
    monkeypatch.setattr(core.engine.live, "saw", lambda step: 1 / 0)
    core.add("a", [1, 2, 3], max_tokens=4)
    core.run()
    core.assert_all_as_expected()
    assert core.engine.live is None and "cannot be shown" in caplog.text
