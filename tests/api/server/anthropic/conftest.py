"""A server of a scripted model with a template for thinking and tools, for the real `anthropic` client."""

from collections.abc import Iterator
from pathlib import Path

import anthropic
import pytest

from quire.config import ServingConfig
from tests.api.server.conftest import Server, serving
from tests.serving import until

TEMPLATE = (Path(__file__).parents[3] / "data/templates/Qwen-Qwen3-0.6B.jinja").read_text()
KEY = "a-key"


@pytest.fixture(scope="package")
def server(smollm2) -> Iterator[Server]:
    options = {"executor": "tests.scripted:2000", "max_model_len": 4096, "block_size": 16}
    formats = {"tool_call_parser": "hermes", "reasoning_parser": "think", "chat_template": TEMPLATE}
    with serving("smollm2", serving=ServingConfig(max_queued_requests=4), **options, **formats) as server:
        yield server


@pytest.fixture(scope="package")
def client(server) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key=KEY, max_retries=0, timeout=60)


@pytest.fixture(autouse=True)
def nothing_is_left(request):
    """After each test the engine is idle: whatever a test left early was freed."""
    yield
    if "server" in request.fixturenames:
        llm = request.getfixturevalue("server").llm
        until(lambda: not llm.cores.live, 2, "an idle engine")
