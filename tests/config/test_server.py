"""The server's options: safe defaults, flags, and what is refused."""

import pytest

from quire.config.flags import Parser, add_flags, from_args
from quire.config.server import ServerConfig
from quire.errors import ConfigError


def parse(*argv: str) -> ServerConfig:
    parser = Parser()
    add_flags(parser, ServerConfig)
    return from_args(ServerConfig, parser.parse_args(argv))


def test_defaults_are_careful():
    config = ServerConfig()
    assert config.host == "127.0.0.1"
    assert config.allowed_origins == [] and not config.log_requests


def test_keys_can_be_repeated_and_several():
    assert parse("--api-key", "a", "--api-key", "b").api_key == ["a", "b"]
    assert parse().api_key == []


def test_sizes_and_switches_are_read():
    config = parse("--max-body-bytes", "2M", "--no-access-log", "--log-requests", "--log-format", "json", "--port", "0")
    assert config.max_body_bytes == 2 << 20 and not config.access_log and config.log_requests
    assert config.log_format == "json" and config.port == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"port": 70000}, "at most 65535"),
        ({"api_key": [""]}, "non-empty"),
        ({"api_key": ["two words"]}, "visible"),
        ({"admin_api_key": ""}, "visible"),
        ({"admin_api_key": "line\nbreak"}, "visible"),
        ({"served_model_name": [7]}, "non-empty texts"),
        ({"allowed_origins": ["example.com"]}, "no origin"),
        ({"allowed_origins": ["https://example.com/"]}, "no origin"),
        ({"allowed_origins": ['["*"]']}, "no origin"),
        ({"allowed_hosts": ["https://example.com"]}, "no host name"),
        ({"allowed_hosts": ["example.com:8000"]}, "no host name"),
        ({"allowed_hosts": [""]}, "non-empty"),
        ({"ssl_keyfile": "key.pem"}, "--ssl-certfile"),
        ({"max_body_bytes": 0}, "at least 1"),
        ({"ssl_cert_reqs": 2, "ssl_certfile": "cert.pem"}, "--ssl-ca-certs"),
        ({"ssl_ca_certs": "ca.pem"}, "--ssl-certfile"),
        ({"enable_ssl_refresh": True}, "--ssl-certfile"),
        ({"root_path": "llm"}, "--root-path"),
        ({"root_path": "/a b"}, "--root-path"),
        ({"metrics_prefix": "a b"}, "--metrics-prefix"),
        ({"metrics_port": 70000}, "at most 65535"),
        ({"otlp_traces_endpoint": "localhost:4317"}, "grpc://host:4317"),
        ({"otlp_traces_endpoint": "http://user:key@host:4318"}, "must be a URL"),
        ({"otlp_traces_endpoint": "http://host:99999"}, "must be a URL"),
        ({"otlp_traces_endpoint": "file:///tmp/spans"}, "must be a URL"),
        ({"otlp_traces_content": True}, "needs --otlp-traces-endpoint"),
        ({"log_level": "trace"}, "debug, info"),
    ],
)
def test_bad_options_say_what_is_wrong(options, words):
    with pytest.raises(ConfigError, match=words):
        ServerConfig(**options)


def test_what_is_open_although_it_may_not_be_meant_so_is_told():
    assert ServerConfig().open_doors() == ServerConfig(host="0.0.0.0", uds="s").open_doors() == []
    assert "0.0.0.0" in ServerConfig(host="0.0.0.0").open_doors()[0]
    assert "--metrics-host" in ServerConfig(api_key=["k"], metrics_port=1, metrics_host="0.0.0.0").open_doors()[0]
    assert "--ssl-cert-reqs" in ServerConfig(api_key=["k"], ssl_certfile="c", ssl_ca_certs="a").open_doors()[0]


def test_a_refused_key_is_not_repeated():
    with pytest.raises(ConfigError) as error:
        ServerConfig(api_key=["sesame open"])
    assert "sesame" not in str(error.value)


def test_keys_do_not_show_when_the_options_are_printed():
    assert "sesame" not in repr(ServerConfig(api_key=["sesame"], admin_api_key="sesame"))
