"""A hub on loopback, for the real `huggingface_hub`: repositories of bytes, and what can go wrong with them."""

import hashlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


class LoopbackHub:
    """`repos["org/name"]["config.json"]` is a file's content; every repository has the one branch main."""

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, bytes]] = {}
        self.served: dict[str, bytes] = {}  # what is sent instead of a file's own content
        self.listed_names: dict[str, list[str]] = {}  # names that are listed beside
        self.refused: dict[str, tuple[int, str]] = {}  # repository -> status and the hub's word for it
        self.cut_after: int | None = None  # bytes of a large file, then the connection is closed
        self.stalled: str | None = None  # a file that never ends
        self.begun = threading.Event()  # the file that never ends was asked for
        self.asked: list[str] = []  # "GET /path", in order
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub.answer(self)

            do_HEAD = do_GET

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def commit(self, repo: str) -> str:
        """Of what the repository holds now."""
        return hashlib.sha1(repr(sorted(self.repos[repo].items())).encode()).hexdigest()

    def downloads(self) -> list[str]:
        """Names of the files whose content was sent."""
        return [line.split("/", 5)[5] for line in self.asked if line.startswith("GET") and "/resolve/" in line]

    def answer(self, call: BaseHTTPRequestHandler) -> None:
        path = unquote(urlsplit(call.path).path)
        self.asked.append(f"{call.command} {path}")
        parts = path.strip("/").split("/")
        if path.startswith("/api/") and parts[1] != "models":
            return self._fail(call, 404, "")  # what the client likes to know beside
        if parts[0] == "api":
            repo, revision = "/".join(parts[2:4]), parts[5] if len(parts) > 5 else "main"
        else:
            repo, revision = "/".join(parts[:2]), parts[3]
        if repo in self.refused:
            return self._fail(call, *self.refused[repo])
        if repo not in self.repos:
            return self._fail(call, 404, "RepoNotFound")
        if revision not in ("main", self.commit(repo)):
            return self._fail(call, 404, "RevisionNotFound")
        if parts[0] == "api":
            return self._send(call, json.dumps(self._info(repo)).encode(), {"Content-Type": "application/json"})
        self._file(call, repo, "/".join(parts[4:]))

    def _info(self, repo: str) -> dict:
        siblings = [
            {
                "rfilename": name,
                "size": len(content),
                "blobId": hashlib.sha1(content).hexdigest(),
                "lfs": {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 1},
            }
            for name, content in self.repos[repo].items()
        ]
        siblings += [{"rfilename": name} for name in self.listed_names.get(repo, [])]
        facts = {"id": repo, "sha": self.commit(repo), "private": False, "tags": [], "downloads": 0, "likes": 0}
        return facts | {"siblings": siblings}

    def _file(self, call: BaseHTTPRequestHandler, repo: str, name: str) -> None:
        content = self.repos[repo].get(name)
        if content is None:
            return self._fail(call, 404, "EntryNotFound")
        etag = hashlib.sha256(content).hexdigest()
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": self.commit(repo), "Accept-Ranges": "bytes"}
        self._send(call, self.served.get(name, content), headers, name)

    def _send(self, call: BaseHTTPRequestHandler, body: bytes, headers: dict[str, str], name: str = "") -> None:
        call.send_response(200)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            call.send_header(key, value)
        call.end_headers()
        if call.command == "HEAD":
            return
        if name and name == self.stalled:
            call.wfile.write(body[: len(body) // 2])
            call.wfile.flush()
            self.begun.set()
            while self.stalled:
                time.sleep(0.05)
            call.close_connection = True
        elif name and self.cut_after is not None and len(body) > self.cut_after:
            call.wfile.write(body[: self.cut_after])
            call.close_connection = True
        else:
            call.wfile.write(body)

    def _fail(self, call: BaseHTTPRequestHandler, status: int, word: str) -> None:
        call.send_response(status)
        call.send_header("X-Error-Code", word)
        call.send_header("Content-Length", "0")
        call.end_headers()


@contextmanager
def running_hub() -> Iterator[LoopbackHub]:
    hub = LoopbackHub()
    thread = threading.Thread(target=hub.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.stalled = None
        hub.server.shutdown()
        hub.server.server_close()
        thread.join()
