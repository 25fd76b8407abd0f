"""The files of deploy/ and the page about them say what the server does: flags, ports, paths, times, users."""

import configparser
import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import crossplane
import pytest
import yaml

from quire.api.cli import parser
from quire.api.commands.serve import OPTIONS
from quire.api.server import run, tracing
from quire.api.server.app import policy_of
from quire.config import ServingConfig
from quire.config.file import read_options
from quire.config.flags import from_args
from quire.config.server import ServerConfig
from quire.errors import QuireError

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
PAGES = [(ROOT / "docs" / name).read_text() for name in ("deploy.md", "tracing.md")]
PAGE = PAGES[0]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
USER = 10001
CACHE = "/var/cache/quire"
AFTER_DRAIN_S = run.LAST_BYTES_S + tracing.CLOSE_S  # what a server may take beside --shutdown-timeout


def documents(name: str) -> list[dict]:
    return [each for each in yaml.safe_load_all((DEPLOY / name).read_text()) if each]


def served(*words: str) -> tuple[ServerConfig, ServingConfig]:
    """What `quire serve` makes of a command line."""
    args = parser(["serve"]).parse_args(["serve", *words])
    return from_args(ServerConfig, args), from_args(ServingConfig, args)


def image() -> dict[str, list[str]]:
    """The lines of the image's last stage by instruction."""
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    found: dict[str, list[str]] = {}
    for line in text.rpartition("\nFROM ")[2].splitlines()[1:]:
        if line.strip() and not line.startswith("#"):
            name, _, rest = line.partition(" ")
            found.setdefault(name, []).append(rest.strip())
    return found


def in_image(*words: str) -> tuple[ServerConfig, ServingConfig]:
    entry = json.loads(image()["ENTRYPOINT"][0])
    assert entry[:2] == ["quire", "serve"]
    return served(*entry[2:], *words)


def unit() -> dict[str, dict[str, str]]:
    found = configparser.ConfigParser(interpolation=None, strict=False)
    found.optionxform = str
    found.read(DEPLOY / "quire.service")
    return {name: dict(found[name]) for name in found.sections()}


def seconds(text: str) -> float:
    return float(text.removesuffix("s"))


def test_every_file_is_on_the_page():
    assert [path.name for path in DEPLOY.iterdir() if f"(../deploy/{path.name})" not in PAGE] == []


def test_what_the_page_quotes_is_in_a_file():
    files = [path.read_text() for path in DEPLOY.iterdir()]
    quoted = [text for language, text in BLOCK.findall(PAGE) if language in ("yaml", "nginx")]
    assert len(quoted) == 4
    assert [text for text in quoted if not any(text in file for file in files)] == []


@pytest.mark.parametrize("page", PAGES, ids=["deploy", "tracing"])
def test_every_flag_that_is_named_exists(page):
    known = set()
    for command in ("serve", "info"):
        known |= set(parser([command])._subparsers._group_actions[0].choices[command]._option_string_actions)
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", BLOCK.sub("", page)))
    assert named and named - known == set()


def test_every_command_of_ours_on_the_page_is_understood():
    commands = [
        line.replace("\\\n", " ")
        for page in PAGES
        for language, text in BLOCK.findall(page)
        if language == "bash"
        for line in re.split(r"(?<!\\)\n", text)
    ]
    ours = [shlex.split(line, comments=True) for line in commands if re.match(r"\s*quire ", line)]
    assert len(ours) == 3
    for words in ours:
        parser(words[1:]).parse_args(words[1:])
    [docker] = [shlex.split(line) for line in commands if line.startswith("docker run -d ")]
    server, serving = in_image(*docker[docker.index("quire", docker.index("-p")) + 1 :])
    assert server.api_key_file == "/run/secrets/keys"
    assert {"--read-only", "--init", "no-new-privileges"} <= set(docker)
    assert serving.shutdown_timeout + AFTER_DRAIN_S < float(docker[docker.index("--stop-timeout") + 1])


def test_the_image_runs_as_nobody_special_and_writes_to_its_cache_alone():
    lines = image()
    assert lines["USER"] == ["quire"] and f"--uid {USER}" in lines["RUN"][0] and f"--gid {USER}" in lines["RUN"][0]
    server, _ = in_image()
    assert (server.host, lines["EXPOSE"]) == ("0.0.0.0", [str(server.port)])
    assert lines["STOPSIGNAL"] == ["SIGTERM"] and lines["VOLUME"] == [CACHE]
    [path] = re.findall(rf"http://127\.0\.0\.1:{server.port}(/\w+)", lines["HEALTHCHECK"][0])
    assert policy_of("GET", path) == "open"
    variables = dict(word.split("=", 1) for line in lines["ENV"] for word in line.split())
    folders = [variables[name] for name in ("QUIRE_CACHE", "HF_HOME", "TRITON_CACHE_DIR")]
    assert all(folder.startswith(CACHE) for folder in folders)


def test_the_config_file_is_a_closed_server_on_this_machine():
    given = read_options(str(DEPLOY / "serve.yaml"), OPTIONS[1:])
    names = ServerConfig.__dataclass_fields__
    server = ServerConfig(**{name: value for name, value in given.items() if name in names})
    assert server.host == "127.0.0.1" and server.api_key_file == "/etc/quire/keys" and server.open_doors() == []
    assert given["shutdown_timeout"] + AFTER_DRAIN_S < seconds(unit()["Service"]["TimeoutStopSec"])


def test_the_unit_starts_the_server_as_a_user_that_may_write_to_its_cache():
    service = unit()["Service"]
    command = shlex.split(service["ExecStart"])
    assert command[0].endswith("/bin/quire") and command[1:] == ["serve", "--config", "/etc/quire/serve.yaml"]
    assert service["User"] == "quire" and service["CacheDirectory"] == "quire" and service["KillMode"] == "mixed"
    folders = dict(word.split("=") for word in service["Environment"].split())
    assert all(folder.startswith(CACHE) for folder in folders.values()) and len(folders) == 3
    assert service["ProtectSystem"] == "strict" and service["NoNewPrivileges"] == "yes"
    assert service["CapabilityBoundingSet"] == "" and int(service["LimitNOFILE"]) > run.OTHER_FILES + 4096
    assert QuireError.exit_code not in map(int, service["RestartPreventExitStatus"].split())


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_finds_no_mistake_in_the_unit_and_little_that_it_exposes(tmp_path):
    text = (DEPLOY / "quire.service").read_text().replace("/usr/local/lib/quire/bin/quire", shutil.which("true"))
    path = tmp_path / "quire.service"
    path.write_text(text)
    done = subprocess.run(["systemd-analyze", "verify", str(path)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    rating = ["systemd-analyze", "security", "--offline=true", "--threshold=20", "--no-pager", str(path)]
    done = subprocess.run(rating, capture_output=True, text=True, timeout=60)
    if "--offline" not in done.stderr:  # systemd 250 and later
        assert done.returncode == 0, done.stdout[-200:]


def test_compose_runs_a_closed_server_on_this_machine():
    [document] = documents("compose.yaml")
    service = document["services"]["quire"]
    server, serving = in_image(*service["command"])
    assert server.api_key_file == "/run/secrets/keys" and list(document["secrets"]) == service["secrets"] == ["keys"]
    assert service["ports"] == [f"127.0.0.1:{server.port}:{server.port}"]
    assert service["volumes"] == [f"cache:{CACHE}"] and service["tmpfs"][0].startswith("/tmp:")
    assert service["user"] == f"{USER}:{USER}" and service["read_only"] and service["init"]
    assert service["cap_drop"] == ["ALL"] and service["security_opt"] == ["no-new-privileges:true"]
    assert serving.shutdown_timeout + AFTER_DRAIN_S < seconds(service["stop_grace_period"])
    assert (DEPLOY / service["build"]["context"] / "Dockerfile").exists()


def test_compose_with_a_gpu_adds_to_the_same_service():
    [document] = documents("compose.gpu.yaml")
    [device] = document["services"]["quire"]["deploy"]["resources"]["reservations"]["devices"]
    assert device["driver"] == "nvidia" and device["capabilities"] == ["gpu"]
    assert list(document["services"]) == list(documents("compose.yaml")[0]["services"])


def kubernetes(kind: str) -> dict:
    [found] = [each for each in documents("kubernetes.yaml") if each["kind"] == kind]
    return found


def test_kubernetes_asks_paths_that_are_there_and_waits_as_long_as_the_server_takes():
    pod = kubernetes("StatefulSet")["spec"]["template"]["spec"]
    [container] = pod["containers"]
    server, serving = in_image(*container["args"])
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"http": server.port}
    probes = {name: container[f"{name}Probe"] for name in ("startup", "readiness", "liveness")}
    paths = {name: probe["httpGet"]["path"] for name, probe in probes.items()}
    assert paths == {"startup": "/ready", "readiness": "/ready", "liveness": "/live"}
    assert all(policy_of("GET", path) == "open" for path in paths.values())
    assert all(probe["httpGet"]["port"] in ports for probe in probes.values())
    startup = probes["startup"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= serving.startup_timeout_s
    program, wait_s = container["lifecycle"]["preStop"]["exec"]["command"]
    assert program == "sleep"
    stop_s = float(wait_s) + serving.shutdown_timeout + AFTER_DRAIN_S
    assert stop_s < pod["terminationGracePeriodSeconds"]


def test_kubernetes_gives_the_pod_no_rights_but_its_cache():
    pod = kubernetes("StatefulSet")["spec"]["template"]["spec"]
    [container] = pod["containers"]
    server, _ = in_image(*container["args"])
    assert pod["securityContext"].items() >= {"runAsNonRoot": True, "runAsUser": USER, "fsGroup": USER}.items()
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    own = container["securityContext"]
    assert own["readOnlyRootFilesystem"] and not own["allowPrivilegeEscalation"]
    assert own["capabilities"] == {"drop": ["ALL"]}
    mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    assert {path for path, mount in mounts.items() if not mount.get("readOnly")} == {CACHE, "/tmp"}
    assert str(Path(server.api_key_file).parent) in mounts
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    claims = {claim["metadata"]["name"] for claim in kubernetes("StatefulSet")["spec"]["volumeClaimTemplates"]}
    assert {mount["name"] for mount in mounts.values()} == set(volumes) | claims
    assert volumes["keys"]["secret"]["secretName"] in PAGE


def test_kubernetes_objects_are_about_the_same_pods():
    spec = kubernetes("StatefulSet")["spec"]
    labels = spec["template"]["metadata"]["labels"]
    assert spec["selector"]["matchLabels"] == labels == kubernetes("Service")["spec"]["selector"]
    assert kubernetes("PodDisruptionBudget")["spec"]["selector"]["matchLabels"] == labels
    assert kubernetes("NetworkPolicy")["spec"]["podSelector"]["matchLabels"] == labels
    assert kubernetes("Service")["spec"]["ports"][0]["targetPort"] == "http"
    assert spec["serviceName"] == kubernetes("Service")["metadata"]["name"]
    assert spec["template"]["spec"]["serviceAccountName"] == kubernetes("ServiceAccount")["metadata"]["name"]
    assert spec["replicas"] > kubernetes("PodDisruptionBudget")["spec"]["maxUnavailable"]
    assert {each["metadata"]["namespace"] for each in documents("kubernetes.yaml")} == {"quire"}


def nginx(tmp_path: Path) -> tuple[list[dict], list[dict]]:
    """(upstreams, servers)"""
    main = tmp_path / "nginx.conf"
    main.write_text(f"events {{}}\nhttp {{ include {DEPLOY / 'nginx.conf'}; }}\n")
    parsed = crossplane.parse(str(main))
    assert parsed["status"] == "ok", parsed["errors"]
    [_, config] = parsed["config"]
    blocks = config["parsed"]
    return [each for each in blocks if each["directive"] == "upstream"], [
        each for each in blocks if each["directive"] == "server"
    ]


def arguments(block: dict, name: str) -> list[str]:
    [found] = [each["args"] for each in block["block"] if each["directive"] == name]
    return found


def test_nginx_passes_every_token_on_and_lets_nobody_in_but_to_the_api(tmp_path):
    [upstream], [plain, secure] = nginx(tmp_path)
    given = read_options(str(DEPLOY / "serve.yaml"), OPTIONS[1:])
    assert arguments(upstream, "server") == [f"{given['host']}:{given['port']}"]
    assert seconds(arguments(upstream, "keepalive_timeout")[0]) < ServerConfig().keep_alive_s
    assert arguments(plain, "return")[0] == "301"
    places = {each["args"][0]: each for each in secure["block"] if each["directive"] == "location"}
    assert set(places) == {"/v1/", "/v1/engine/", "/"}
    assert arguments(places["/"], "return") == arguments(places["/v1/engine/"], "return") == ["404"]
    assert given["allowed_hosts"] == arguments(secure, "server_name")
    api = places["/v1/"]
    assert arguments(api, "proxy_pass") == ["http://quire"] and arguments(api, "proxy_http_version") == ["1.1"]
    assert arguments(api, "proxy_buffering") == ["off"] and arguments(api, "proxy_next_upstream") == ["off"]
    assert seconds(arguments(api, "proxy_read_timeout")[0]) > given["request_timeout_s"]
    assert arguments(secure, "client_max_body_size") == [f"{ServerConfig().max_body_bytes >> 20}m"]


def braces(text: str) -> list:
    """Lines as lists of words, each followed by a list of the lines in its braces."""
    stack: list[list] = [[]]
    for line in text.splitlines():
        words = line.split("#")[0].split()
        if words and words[-1] == "{":
            inner: list = []
            stack[-1].append((words[:-1], inner))
            stack.append(inner)
        elif words == ["}"]:
            stack.pop()
        elif words:
            stack[-1].append((words, []))
    assert len(stack) == 1
    return stack[0]


def test_caddy_does_the_same():
    [(_, site)] = braces((DEPLOY / "Caddyfile").read_text())
    given = read_options(str(DEPLOY / "serve.yaml"), OPTIONS[1:])
    parts = {" ".join(words): inner for words, inner in site}
    assert set(parts) == {"request_body", "handle /v1/*", "handle /v1/engine/*", "handle"}
    assert parts["handle"] == parts["handle /v1/engine/*"] == [(["respond", "404"], [])]
    assert parts["request_body"] == [(["max_size", f"{ServerConfig().max_body_bytes >> 20}MiB"], [])]
    [(words, options)] = parts["handle /v1/*"]
    assert words == ["reverse_proxy", f"{given['host']}:{given['port']}"]
    assert (["flush_interval", "-1"], []) in options
    [transport] = [inner for words, inner in options if words == ["transport", "http"]]
    times = {words[0]: seconds(words[1]) for words, _ in transport}
    assert times["response_header_timeout"] > given["request_timeout_s"]
    assert times["keepalive"] < ServerConfig().keep_alive_s
