"""`/v1/engine/live`: who may watch, what is sent; watching ends with its readers, and not with a core."""

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Iterator

import httpx
import pytest

from quire.api.server.live_feed import MAX_WATCHERS
from quire.config.server import ServerConfig
from tests.api.server.conftest import serving
from tests.serving import ROOT, ServerProcess, until

LIVE = "/v1/engine/live"
MAX_BYTES = 32 << 10


@contextlib.contextmanager
def watching(url: str, **options) -> Iterator[Iterator[dict]]:
    """Updates, as they come."""
    with httpx.stream("GET", url + LIVE, timeout=30, **options) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        yield (json.loads(line.removeprefix("data: ")) for line in answer.iter_lines() if line.startswith("data: "))


def until_shown(updates: Iterator[dict], is_shown, most: int = 120) -> dict:
    for _, update in zip(range(most), updates):
        if is_shown(update):
            return update
    raise AssertionError(f"not shown: {update}")


def complete(url: str, **fields) -> httpx.Response:
    body = {"prompt": [5, 6, 7, 8] * 8, "max_tokens": 100, "ignore_eos": True, **fields}
    return httpx.post(url + "/v1/completions", json=body, timeout=60)


def test_four_updates_a_second_tell_of_a_request_from_beginning_to_end(echo):
    with watching(echo.url) as updates:
        first = until_shown(updates, lambda update: update["core"] is not None)
        assert first["version"] == 1 and first["server"]["state"] == "awake" and first["server"]["watchers"] == 1
        thread = threading.Thread(target=complete, args=[echo.url])
        started = time.monotonic()
        thread.start()
        running = until_shown(updates, lambda update: update["core"]["counts"]["running"])
        row = dict(zip(running["core"]["requests"]["columns"], running["core"]["requests"]["rows"][0]))
        assert row["phase"] in ("prefill", "decode") and row["prompt"] == 32 and row["max_output"] == 100
        ended = until_shown(updates, lambda update: update["server"]["latency"]["latency_ms"]["count"])
        thread.join()
        seconds = time.monotonic() - started
        num_updates = ended["core"]["update"] - first["core"]["update"]
        assert seconds * 4 - 4 <= num_updates <= seconds * 4 + 4
    latency = ended["server"]["latency"]
    assert 0 < latency["ttft_ms"]["p50"] <= latency["latency_ms"]["p50"] and latency["token_ms"]["p99"] > 5
    assert row["id"] in {each[0] for each in ended["core"]["requests"]["rows"]}
    assert sum(ended["core"]["steps"]["decode"]) > 0 and ended["core_age_s"] < 1


def test_the_documents_example_has_every_field_of_an_update(echo):
    def fields(value, path: str = "") -> set[str]:
        if isinstance(value, list) and value and isinstance(value[0], dict):
            return fields(value[0], path + "[]")
        if not isinstance(value, dict):
            return {path}
        return set().union(*(fields(inner, f"{path}.{name}") for name, inner in value.items()))

    page = (ROOT / "docs" / "live.md").read_text()
    example = json.loads(page.partition("```json\n")[2].partition("```")[0])
    with watching(echo.url) as updates:
        update = until_shown(updates, lambda update: update["core"] is not None)
    optional = (".core.speculation", ".server.restarts.recent")
    told, shown = ({field for field in fields(found) if not field.startswith(optional)} for found in (example, update))
    assert told == shown
    for table in ("requests", "prefix"):
        assert example["core"][table]["columns"] == update["core"][table]["columns"]
        assert all(f"`{name}`" in page for name in update["core"][table]["columns"])


def test_nothing_is_recorded_before_the_first_watcher_and_after_the_last(echo):
    metrics, feed = echo.llm.metrics.engines[0], echo.llm  # the feed is the app's; what it turns on is seen here
    until(lambda: metrics.latencies is None, 5, "nobody watching")
    complete(echo.url, max_tokens=2)
    with watching(echo.url) as updates:
        update = until_shown(updates, lambda update: update["core"] is not None)
        assert update["core"]["steps"]["count"] == 0 and update["core"]["prefix"]["nodes"] == []
        assert update["server"]["latency"]["ttft_ms"] == {"count": 0, "p50": None, "p90": None, "p99": None}
        assert metrics.latencies is not None and feed.cores.supervisors[0]._on_live is not None
    until(lambda: metrics.latencies is None and feed.cores.supervisors[0]._on_live is None, 5, "nobody watching")


def test_all_watchers_get_the_same_bytes_and_one_too_many_is_turned_away(echo):
    with contextlib.ExitStack() as stack:
        readers = [stack.enter_context(watching(echo.url)) for _ in range(MAX_WATCHERS)]
        shown = [
            until_shown(updates, lambda update: update["server"]["watchers"] == MAX_WATCHERS) for updates in readers
        ]
        by_number: dict[int, list[dict]] = {}
        for update in shown:
            by_number.setdefault(update["core"]["update"], []).append(update)
        assert all(update == same[0] for same in by_number.values() for update in same)
        refused = httpx.get(echo.url + LIVE)
        assert refused.status_code == 503 and "retry-after" in refused.headers
        assert "8 watch the engine already" in refused.json()["error"]["message"]
    until(lambda: httpx.head(echo.url + LIVE).status_code == 200)
    with watching(echo.url) as updates:
        until_shown(updates, lambda update: update["server"]["watchers"] == 1)


def test_an_update_has_no_text_and_no_name_of_a_request(echo):
    def ask() -> None:
        headers = {"x-request-id": "my-own-id"}
        body = {"prompt": "xylophone " * 20, "max_tokens": 60, "ignore_eos": True}
        httpx.post(echo.url + "/v1/completions", json=body, headers=headers, timeout=60)

    thread = threading.Thread(target=ask)
    with watching(echo.url) as updates:
        until_shown(updates, lambda update: update["core"] is not None)
        thread.start()
        update = until_shown(updates, lambda update: update["core"]["counts"]["running"])
    thread.join()
    text = json.dumps(update)
    assert "xylophone" not in text and "my-own-id" not in text and len(text) < MAX_BYTES


@pytest.mark.parametrize(
    ("keys", "statuses"),
    [
        ({}, {None: 200, "user": 200}),
        ({"api_key": ["user"]}, {None: 403, "user": 403}),
        ({"admin_api_key": "root"}, {None: 401, "user": 401, "root": 200}),
        ({"api_key": ["user"], "admin_api_key": "root"}, {None: 401, "user": 401, "root": 200}),
    ],
    ids=["no keys", "keys", "admin", "both"],
)
def test_who_may_watch(smollm2, keys, statuses):
    with serving(str(smollm2), ServerConfig(**keys), executor="echo", max_model_len=256) as server:
        for key, status in statuses.items():
            headers = {"authorization": f"Bearer {key}"} if key else {}
            if status == 200:
                with watching(server.url, headers=headers) as updates:
                    assert next(updates)["version"] == 1
            else:
                answer = httpx.get(server.url + LIVE, headers=headers)
                assert answer.status_code == status and answer.json()["error"]["message"]


@pytest.fixture(scope="module")
def process(smollm2) -> Iterator[ServerProcess]:
    with ServerProcess("--executor", "echo:50", "--max-model-len", "4096") as server:
        yield server


def test_watching_goes_on_when_the_engine_is_replaced(process):
    with watching(process.url) as updates:
        until_shown(updates, lambda update: update["core"] is not None)
        thread = threading.Thread(target=complete, args=[process.url], kwargs={"max_tokens": 400})
        thread.start()
        before = until_shown(updates, lambda update: update["core"]["counts"]["running"])
        os.kill(process.core_pid(), signal.SIGKILL)
        gone = until_shown(updates, lambda update: update["core"] is None)
        assert gone["server"]["state"] == "starting" and gone["core_age_s"] is None and gone["server"]["requests"] == 1
        after = until_shown(updates, lambda update: update["core"] and update["core"]["counts"]["running"])
        thread.join()
    restarts = after["server"]["restarts"]
    assert restarts["count"] == 1 and after["server"]["suspects"] == {"groups": [], "convicted": 0}
    assert restarts["recent"][0]["cause"] == "outside" and restarts["recent"][0]["was_ready"]
    assert after["core"]["update"] < before["core"]["update"] + 10
    (row,) = after["core"]["requests"]["rows"]
    assert row[after["core"]["requests"]["columns"].index("phase")] in ("prefill", "decode")


def test_the_engine_is_shown_asleep_and_awake_again(smollm2):
    with ServerProcess("--executor", "echo", "--admin-api-key", "root") as server:
        root = {"authorization": "Bearer root"}
        with watching(server.url, headers=root) as updates:
            until_shown(updates, lambda update: update["core"] is not None)
            server.client.post("/sleep", headers=root).raise_for_status()
            until_shown(updates, lambda update: update["server"]["state"] == "asleep")
            os.kill(server.core_pid(), signal.SIGKILL)  # the next one loads nothing, and takes any message for a call
            until_shown(updates, lambda update: update["server"]["restarts"]["count"] and update["core"] is None)
            time.sleep(1)
            assert server.get("/is_sleeping", headers=root).json() == {"is_sleeping": True}
            server.client.post("/wake_up", headers=root).raise_for_status()
            awake = until_shown(updates, lambda update: update["server"]["state"] == "awake" and update["core"])
            assert awake["core"]["counts"]["running"] == 0


def test_a_server_that_is_told_to_stop_does_not_wait_for_watchers(smollm2):
    with ServerProcess("--executor", "echo") as server, watching(server.url) as updates:
        next(updates)
        started = time.monotonic()
        server.signal(signal.SIGTERM)
        for _ in updates:
            pass
        assert server.process.wait(20) == 0
        assert time.monotonic() - started < 4
        assert "Traceback" not in server.log()


def test_each_engine_of_a_server_is_watched_by_itself(smollm2):
    with serving(str(smollm2), executor="echo:50", max_model_len=256, data_parallel_size=2) as server:
        with watching(server.url) as first, watching(server.url, params={"engine": 1}) as second:
            threads = [threading.Thread(target=complete, args=[server.url]) for _ in range(2)]
            for thread in threads:
                thread.start()
            for engine, updates in enumerate((first, second)):
                update = until_shown(updates, lambda update: update["core"] and update["core"]["counts"]["running"])
                assert update["core"]["counts"]["running"] == update["server"]["requests"] == 1
                assert (update["server"]["engine"], update["server"]["engines"]) == (engine, 2)
                assert update["server"]["watchers"] == 2
            for thread in threads:
                thread.join()
        for wrong, status in (("2", 400), ("-1", 400), ("x", 400)):
            answer = httpx.get(server.url + LIVE, params={"engine": wrong})
            assert answer.status_code == status and answer.json()["error"]["param"] == "engine"
        until(lambda: all(each.latencies is None for each in server.llm.metrics.engines), 5, "nobody watching")


def test_no_ui_turns_the_page_off_and_leaves_the_engines_view(smollm2):
    with ServerProcess("--executor", "echo", "--no-ui") as server:
        assert server.get("/").status_code == 404 and server.get("/ui/index.html").status_code == 404
        with watching(server.url) as updates:
            assert next(updates)["version"] == 1
