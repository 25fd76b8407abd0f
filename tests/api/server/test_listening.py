"""Where the server listens: Unix sockets, certificates, paths behind a proxy, the port for metrics."""

import asyncio
import contextlib
import os
import shutil
import socket
import ssl
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import uvloop

from quire.api.server import run
from quire.api.server.app import only_metrics
from quire.api.server.run import Web
from quire.api.server.sockets import listen, listen_unix
from quire.api.server.tls import Certificates
from quire.config.server import ServerConfig
from quire.errors import ConfigError
from quire.metrics.serving import ServingMetrics
from tests.serving import until

CERTIFICATE = Path(__file__).with_name("localhost.pem")
OTHER = Path(__file__).with_name("other.pem")  # as the first, of another key


async def shows_path(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": f"{scope['path']} {scope['scheme']}".encode()})


@contextlib.contextmanager
def serving(sock: socket.socket, app=shows_path, metrics=None, **options) -> Iterator[Web]:
    web = Web()
    web.add(app, lambda method, path: "user", ServerConfig(**options), sock, metrics or ServingMetrics("m"))

    def live() -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(web.serve())

    thread = threading.Thread(target=live, daemon=True)
    thread.start()
    until(lambda: all(http.started for http, _ in web.servers), 5)
    try:
        yield web
    finally:
        web.stop()
        thread.join(10)
        assert not thread.is_alive()


# -- Unix sockets ------------------------------------------------------------------------------------------------------


def over(path: Path) -> httpx.Client:
    return httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://server")


def test_a_unix_socket_is_for_this_user_alone_and_gone_at_the_end(tmp_path):
    path = tmp_path / "s"
    with listen_unix(str(path)) as sock, serving(sock, uds=str(path)):
        assert stat.S_IMODE(os.lstat(path).st_mode) == 0o600
        with over(path) as client:
            assert client.get("/a").text == "/a http"
            assert client.get("/b").text == "/b http"
    assert not path.exists()


def test_a_socket_that_was_left_behind_is_replaced(tmp_path):
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    with listen_unix(str(path)) as sock, serving(sock, uds=str(path)), over(path) as client:
        assert client.get("/").status_code == 200


def test_a_socket_in_use_and_other_files_are_left_alone(tmp_path):
    path = tmp_path / "s"
    with listen_unix(str(path)), pytest.raises(ConfigError, match="in use"):
        with listen_unix(str(path)):
            pass
    path.write_text("precious")
    with pytest.raises(ConfigError, match="no socket"), listen_unix(str(path)):
        pass
    assert path.read_text() == "precious"
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(ConfigError, match="no socket"), listen_unix(str(tmp_path / "link")):
        pass


@pytest.mark.parametrize("path", ["x" * 200, "no-such-folder/s", "a\0b", "\0abstract"])
def test_a_path_that_cannot_be_a_socket_is_told(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="--uds"), listen_unix(path):
        pass


def test_the_socket_of_a_server_that_took_over_is_not_removed(tmp_path):
    path = tmp_path / "s"
    with listen_unix(str(path)):
        path.rename(tmp_path / "old")
        with socket.socket(socket.AF_UNIX) as mine:
            mine.bind(str(path))
    assert path.exists()


# -- certificates ------------------------------------------------------------------------------------------------------


def trusts(port: int, certificate: Path, **options) -> bool:
    context = ssl.create_default_context(cafile=str(certificate))
    if mine := options.get("mine"):
        context.load_cert_chain(str(mine))
    try:
        return httpx.get(f"https://localhost:{port}/a", verify=context).text == "/a https"
    except httpx.TransportError:
        return False


def test_a_new_certificate_is_taken_and_a_bad_one_is_not(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(run, "REFRESH_S", 0.05)
    file = tmp_path / "pem"
    shutil.copy(CERTIFICATE, file)
    with listen("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        with serving(sock, ssl_certfile=str(file), enable_ssl_refresh=True):
            assert trusts(port, CERTIFICATE) and not trusts(port, OTHER)
            shutil.copy(OTHER, file)
            until(lambda: trusts(port, OTHER), 5, "the new certificate")
            assert not trusts(port, CERTIFICATE)
            for bad in (b"", b"no certificate\n", OTHER.read_bytes()[:600]):
                caplog.clear()
                file.write_bytes(bad)
                until(lambda: "the one from before" in caplog.text, 5, "the line in the log")
                assert trusts(port, OTHER)
            file.unlink()
            shutil.copy(CERTIFICATE, file)
            until(lambda: trusts(port, CERTIFICATE), 5, "the first certificate")


def test_a_certificate_written_while_it_is_loaded_is_loaded_again(tmp_path, monkeypatch, caplog):
    file = tmp_path / "pem"
    shutil.copy(CERTIFICATE, file)
    certificates = Certificates(ServerConfig(ssl_certfile=str(file), enable_ssl_refresh=True))
    load = certificates._load
    monkeypatch.setattr(certificates, "_load", lambda: (shutil.copy(OTHER, file), load())[1])
    file.write_bytes(b"")
    asyncio.run(certificates.refresh())
    monkeypatch.setattr(certificates, "_load", load)
    assert "the one from before" not in caplog.text
    file.write_bytes(b"")  # as it was when it was first looked at, but not when it was loaded
    asyncio.run(certificates.refresh())
    assert "the one from before" in caplog.text


def test_without_the_flag_the_certificate_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "REFRESH_S", 0.05)
    file = tmp_path / "pem"
    shutil.copy(CERTIFICATE, file)
    with listen("127.0.0.1", 0) as sock, serving(sock, ssl_certfile=str(file)) as web:
        shutil.copy(OTHER, file)
        assert not any(isinstance(files, Certificates) for files in web.refreshed)
        assert trusts(sock.getsockname()[1], CERTIFICATE)


@pytest.mark.parametrize("refresh", [False, True])
def test_clients_may_have_to_show_a_certificate(refresh):
    options = {"ssl_certfile": str(CERTIFICATE), "ssl_ca_certs": str(OTHER), "ssl_cert_reqs": 2}
    with listen("127.0.0.1", 0) as sock, serving(sock, **options, enable_ssl_refresh=refresh):
        port = sock.getsockname()[1]
        assert trusts(port, CERTIFICATE, mine=OTHER)
        assert not trusts(port, CERTIFICATE) and not trusts(port, CERTIFICATE, mine=CERTIFICATE)


@pytest.mark.parametrize("file", ["no-such-file", str(Path(__file__))])
def test_authorities_that_cannot_be_read_are_told(file):
    with pytest.raises(ConfigError, match="--ssl-ca-certs"):
        Certificates(ServerConfig(ssl_certfile=str(CERTIFICATE), ssl_ca_certs=file, ssl_cert_reqs=2))


# -- paths and metrics -------------------------------------------------------------------------------------------------


def test_a_proxys_path_is_taken_off():
    with listen("127.0.0.1", 0) as sock, serving(sock, root_path="/llm/"):
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        for path in ("/llm/v1/models", "/v1/models"):
            assert httpx.get(url + path).text == "/v1/models http"
        assert httpx.get(url + "/llmx/v1").text == "/llmx/v1 http"


def test_calls_are_counted_by_path_and_status():
    metrics = ServingMetrics("m")
    with listen("127.0.0.1", 0) as sock, serving(sock, metrics=metrics, api_key=["k"]):
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        key = {"authorization": "Bearer k"}
        for path in ("/v1/models", "/v1/models/a", "/v1/models/b", "/x", "/y", "/metrics", "/health"):
            assert httpx.get(url + path, headers=key).status_code == 200
        assert httpx.get(url + "/v1/models").status_code == 401
    assert metrics.http == {
        ("GET", "/v1/models", "2xx"): 1,
        ("GET", "/v1/models/{model}", "2xx"): 2,
        ("GET", "none", "2xx"): 2,
        ("GET", "/v1/models", "4xx"): 1,
    }


def test_the_port_for_metrics_has_nothing_else():
    with listen("127.0.0.1", 0) as sock, serving(sock, app=only_metrics(shows_path)):
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        assert httpx.get(url + "/metrics").status_code == 200
        for path in ("/", "/v1/models", "/metrics/", "/metrics/../v1/models", "//metrics"):
            assert httpx.get(url + path).status_code == 404
