"""/ and /ui/NAME: the page for people, chat and engine, served from memory as the package has it.

Called by `app.py`, unless `--no-ui` turns it off. Needs no key: these are the same bytes on every server of this
version, whatever its model and keys; what the page shows, it asks of the other endpoints, with its visitor's key.
"""

import functools
import hashlib
from importlib import resources
from typing import NamedTuple

from quire.api.server.calls import Answer, Call
from quire.api.server.errors import no_such_path

START = "index.html"
TYPES = {
    ".html": b"text/html; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
}
POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    b"base-uri 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
HEADERS = [
    (b"cache-control", b"no-cache"),  # browsers keep it, and ask each time whether it has changed
    (b"content-security-policy", POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
]


class Asset(NamedTuple):
    body: bytes
    content_type: bytes
    etag: bytes


@functools.cache
def assets() -> dict[str, Asset]:
    """The page's files by name, read once."""
    found: dict[str, Asset] = {}
    for file in resources.files("quire").joinpath("ui").iterdir():
        content_type = TYPES.get("." + file.name.rpartition(".")[2])
        if content_type is not None:
            body = file.read_bytes()
            found[file.name] = Asset(body, content_type, b'"%b"' % hashlib.sha256(body).hexdigest()[:32].encode())
    return found


async def start_page(call: Call) -> Answer:
    return _answer(call, START)


async def page_file(call: Call) -> Answer:
    return _answer(call, call.argument)


def _answer(call: Call, name: str) -> Answer:
    asset = assets().get(name)
    if asset is None:
        return Answer.error(no_such_path(), call.errors, call.request_id)
    headers = [(b"etag", asset.etag), *HEADERS]
    if asset.etag in _known_etags(call):
        return Answer(b"", status=304, content_type=asset.content_type, headers=headers)
    return Answer(asset.body, content_type=asset.content_type, headers=headers)


def _known_etags(call: Call) -> list[bytes]:
    """What the browser has already. A proxy that compresses marks an ETag as weak, which is the same here."""
    sent = next((value for name, value in call.headers if name == b"if-none-match"), b"")
    return [etag.strip().removeprefix(b"W/") for etag in sent.split(b",")]
