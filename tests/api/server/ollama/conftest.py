"""Servers for the real `ollama` client: a scripted model that thinks and calls tools (`smol` is SmolLM2 itself)."""

from collections.abc import Iterator
from pathlib import Path

import ollama
import pytest

from quire.config.server import ServerConfig
from tests.api.server.conftest import Server, serving
from tests.serving import until

TEMPLATE = (Path(__file__).parents[3] / "data/templates/Qwen-Qwen3-0.6B.jinja").read_text()
KEY = "a-key"


@pytest.fixture(scope="package")
def scripted(smollm2) -> Iterator[Server]:
    """It wants a key."""
    options = {"executor": "tests.scripted:2000", "max_model_len": 1024, "block_size": 16}
    formats = {"tool_call_parser": "hermes", "reasoning_parser": "think", "chat_template": TEMPLATE}
    with serving("smollm2", ServerConfig(api_key=[KEY]), **options, **formats) as server:
        yield server


@pytest.fixture(scope="package")
def thinker(scripted) -> ollama.Client:
    return ollama.Client(scripted.url, headers={"authorization": f"Bearer {KEY}"}, timeout=60)


@pytest.fixture(scope="package")
def plain(smol) -> ollama.Client:
    """Of SmolLM2, which neither thinks nor calls."""
    return ollama.Client(smol.url, timeout=60)


@pytest.fixture(autouse=True)
def nothing_is_left(request):
    """After each test the engine is idle: whatever a test left early was freed."""
    yield
    if "scripted" in request.fixturenames:
        llm = request.getfixturevalue("scripted").llm
        until(lambda: not llm.cores.live, 2, "an idle engine")
