"""The OpenAPI document: it is valid, says the truth about bodies and keys, and nothing it allows breaks the server."""

import asyncio

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from hypothesis import given as with_examples
from schemathesis.checks import not_a_server_error

from quire.api.server.app import ENDPOINTS, build_app, find, policy_of

OPERATIONS = [(endpoint.method, endpoint.path) for endpoint in ENDPOINTS]


@pytest.fixture(scope="module")
def document(echo) -> dict:
    return httpx.get(echo.url + "/openapi.json").json()


def test_every_endpoint_is_described_and_has_a_policy(document):
    described = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    assert described == set(OPERATIONS)
    names = [operation["operationId"] for methods in document["paths"].values() for operation in methods.values()]
    assert len(set(names)) == len(names)
    for method, path in OPERATIONS:
        assert policy_of(method, path) in ("open", "user", "admin")
    is_open = [path for method, path in OPERATIONS if policy_of(method, path) == "open"]
    assert is_open == ["/live", "/ready", "/health", "/ping", "/ping"]


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


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_nothing_the_document_allows_breaks_the_server(echo, document, method, path):
    body = next((endpoint.body for endpoint in ENDPOINTS if endpoint.path == path), None)
    operation_fields = body.__struct_fields__ if body is not None else ()
    statuses: set[int] = set()
    operation = schemathesis.openapi.from_dict(document)[path][method]

    @settings(max_examples=100, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @with_examples(case=operation.as_strategy())
    def every_case(case):
        if "max_tokens" in operation_fields and isinstance(case.body, dict):  # a long answer is not a broken one
            case.body |= {"max_tokens": 2, "max_completion_tokens": 2, "min_tokens": 0}
            case.body.pop("model", None)
        response = case.call(base_url=echo.url, timeout=30)
        statuses.add(response.status_code)
        if response.status_code != 503:
            case.validate_response(response, checks=[not_a_server_error])

    every_case()
    if policy_of(method, path) == "admin":
        assert statuses == {403}  # there is no key for it here: tests/api/server/test_operate.py has one
    else:
        assert 200 in statuses or "{" in path  # what was tried was not refused altogether


def test_the_app_is_plain_asgi(echo):
    """Embedding: without the guard there is no request id in the scope, and one is made."""
    transport = httpx.ASGITransport(build_app(echo.llm, ["x"]))

    async def call():
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            return (await client.get("/v1/models")).json()

    models = asyncio.run_coroutine_threadsafe(call(), echo.loop).result(10)
    assert [model["id"] for model in models["data"]] == ["x"]
