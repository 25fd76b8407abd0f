"""The page for people: served as the package has it, with headers that keep it from running anything else."""

from pathlib import Path

import httpx
import pytest

import quire
from quire.api.server import ui
from quire.api.server.app import App, policy_of
from quire.config.server import ServerConfig
from tests.api.server.conftest import serving

FOLDER = Path(quire.__file__).parent / "ui"
FILES = sorted(path.name for path in FOLDER.iterdir())
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}


def test_the_page_is_small_and_of_files_that_browsers_read():
    assert "index.html" in FILES and {Path(name).suffix for name in FILES} <= TYPES.keys()
    assert set(ui.assets()) == set(FILES)
    assert sum((FOLDER / name).stat().st_size for name in FILES) <= 300_000


@pytest.mark.parametrize("path", ["/", *(f"/ui/{name}" for name in FILES)])
def test_files_are_served_as_they_are_and_may_load_nothing_else(echo, path):
    answer = httpx.get(echo.url + path)
    name = path.removeprefix("/ui/") if path != "/" else "index.html"
    assert answer.status_code == 200 and answer.content == (FOLDER / name).read_bytes()
    assert answer.headers["content-type"] == TYPES[Path(name).suffix] + "; charset=utf-8"
    assert answer.headers["content-security-policy"] == POLICY
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert answer.headers["cache-control"] == "no-cache"


def test_a_browser_that_has_a_file_gets_none_of_it_again(echo):
    answer = httpx.get(echo.url + "/")
    etag = answer.headers["etag"]
    for known in (etag, f'"other", {etag}', f"W/{etag}"):
        again = httpx.get(echo.url + "/", headers={"if-none-match": known})
        assert again.status_code == 304 and again.content == b"" and again.headers["etag"] == etag
    assert httpx.get(echo.url + "/", headers={"if-none-match": '"other"'}).status_code == 200
    head = httpx.head(echo.url + "/")
    assert head.status_code == 200 and head.content == b"" and head.headers["etag"] == etag


@pytest.mark.parametrize(
    "name", ["nothing.js", "%2e%2e%2fui%2findex.html", "..%2f__init__.py", "%2e%2e/__init__.py", "a/b.js"]
)
def test_there_are_no_other_files(echo, name):
    with httpx.Client() as client:
        url = httpx.URL(echo.url).copy_with(raw_path=b"/ui/" + name.encode())
        answer = client.send(client.build_request("GET", url))
    assert answer.status_code == 404 and answer.json()["error"]["message"]


def test_only_reading_is_allowed(echo):
    answer = httpx.post(echo.url + "/", json={})
    assert answer.status_code == 405 and answer.headers["allow"] == "GET"


def test_without_the_page_its_paths_are_as_any_other_that_does_not_exist(smollm2):
    from quire.api.server.app import build_app
    from quire.frontend.async_llm import AsyncLLM

    llm = AsyncLLM(str(smollm2), executor="echo", max_model_len=256)
    app = build_app(llm, ["x"], has_page=False)
    assert isinstance(app, App) and policy_of("GET", "/") == "open"
    for path in ("/", "/ui/index.html"):
        assert app.policy_of("GET", path) is None
        assert path not in app.service.openapi["paths"]
    assert app.policy_of("GET", "/live") == "open" and app.policy_of("GET", "/v1/models") == "user"


def test_the_page_needs_no_key_where_everything_else_does(smollm2):
    with serving(str(smollm2), ServerConfig(api_key=["k"]), executor="echo", max_model_len=256) as server:
        assert httpx.get(server.url + "/").status_code == 200
        assert httpx.get(server.url + "/v1/models").status_code == 401
        assert httpx.get(server.url + "/v1/engine/live").status_code == 403
