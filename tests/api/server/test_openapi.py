"""The OpenAPI document: it is valid, says the truth about bodies and keys, and nothing it allows breaks the server."""

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from benchmarks import schema_fuzz

from quire.api.server.app import ENDPOINTS, build_app, find, policy_of
from quire.config.server import ServerConfig
from tests.api.server.conftest import Server, serving

OPERATIONS = [(endpoint.method, endpoint.path) for endpoint in ENDPOINTS]
OPERATOR = {"authorization": "Bearer root"}


@pytest.fixture(scope="module")
def document(echo) -> dict:
    return httpx.get(echo.url + "/openapi.json").json()


@pytest.fixture(scope="module")
def schema(document) -> Any:
    return schemathesis.openapi.from_dict(document)


@pytest.fixture(scope="module")
def guarded(smollm2) -> Iterator[Server]:
    """Repeats its prompts; with keys. Few blocks are soon checked."""
    options = {"executor": "echo", "max_model_len": 2048, "num_gpu_blocks_override": 2048}
    with serving(str(smollm2), ServerConfig(api_key=["user"], admin_api_key="root"), **options) as server:
        yield server


def test_every_endpoint_is_described_and_has_a_policy(document):
    described = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    assert described == set(OPERATIONS)
    names = [operation["operationId"] for methods in document["paths"].values() for operation in methods.values()]
    assert len(set(names)) == len(names)
    for method, path in OPERATIONS:
        assert policy_of(method, path) in ("open", "user", "admin", "watch")
    is_open = [path for method, path in OPERATIONS if policy_of(method, path) == "open"]
    assert is_open == ["/", "/ui/{name}", "/live", "/ready", "/health", "/ping", "/ping"]


def test_only_exact_paths_are_found():
    for path in ("/live/", "//live", "/LIVE", "/v1/models/", "/v1", "", "/docs/x", "/v1/chat/completions/../../live"):
        assert find(path)[0] == {} and policy_of("GET", path) is None
    assert find("/v1/models/org/name")[1] == "org/name"
    assert policy_of("DELETE", "/live") is None and policy_of("HEAD", "/live") == "open"


def test_a_body_the_document_describes_is_served(echo, document):
    schema = document["components"]["schemas"]["ChatRequest"]
    assert schema["required"] == ["messages"]
    options = "temperature top_p seed stop logit_bias stream_options max_completion_tokens timeout_s".split()
    assert set(options) <= set(schema["properties"])


def test_the_page_lists_every_endpoint_and_loads_nothing(echo):
    page = httpx.get(echo.url + "/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert all(path in page.text for _, path in OPERATIONS)
    assert "temperature" in page.text
    assert not any(word in page.text for word in ("src=", "<script", "https:"))


ENDING = [pair for pair in OPERATIONS if pair[1] != schema_fuzz.ENDLESS]  # that one has tests of its own


@pytest.mark.parametrize(("method", "path"), ENDING)
def test_answers_are_as_the_document_says(guarded, schema, method, path):
    """Some requests that fit the document and some that do not; `benchmarks/schema_fuzz.py` tries more of them."""
    tried = schema_fuzz.try_operation(guarded.url, schema[path][method], OPERATOR, 24)
    assert not tried.findings
    assert {200, 404} & tried.statuses.keys()  # not all was refused; 404: it names a model there is not


@pytest.mark.parametrize(("method", "path"), [pair for pair in OPERATIONS if policy_of(*pair) == "admin"])
def test_what_needs_an_operator_is_forbidden_where_there_is_no_key_for_one(echo, schema, method, path):
    tried = schema_fuzz.try_operation(echo.url, schema[path][method], {}, 8)
    assert not tried.findings and set(tried.statuses) == {403}


def test_the_app_is_plain_asgi(echo):
    """Embedding: without the guard there is no request id in the scope, and one is made."""
    transport = httpx.ASGITransport(build_app(echo.llm, ["x"]))

    async def call():
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            return (await client.get("/v1/models")).json()

    models = asyncio.run_coroutine_threadsafe(call(), echo.loop).result(10)
    assert [model["id"] for model in models["data"]] == ["x"]
