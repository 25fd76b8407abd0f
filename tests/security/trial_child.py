"""The process in which hostile files and templates are tried: it may hang or grow, and is killed then.

Reads one JSON object per line, {"do": function, argument: value, …}, and answers each with what came of it, how long
it took of a core's time and by how much the process has grown.
"""

import json
import os
import resource
import sys
import time
from typing import Any

asked: set[str] = set()  # files that were looked for or opened


def open_model(folder: str) -> dict[str, Any]:
    """As `quire info` does, and the tokenizer and the template beside."""
    from quire.config import EngineConfig
    from quire.frontend.model import ModelInfo
    from quire.worker.describe import describe

    model = ModelInfo.open(EngineConfig.from_kwargs(model=folder, device="cpu"))
    return describe(model.config)


def open_tokenizer(path: str, text: str = "") -> list[int]:
    from quire.frontend.tokenizer import Tokenizer

    return Tokenizer.from_path(path).encode(text)[:100]


def render(source: str, seconds: float | None = None) -> str:
    from quire.frontend.chat import ChatTemplate

    if seconds is not None:
        from quire.frontend import sandbox

        sandbox.MAX_SECONDS = seconds
    return ChatTemplate(source).render([{"role": "user", "content": "hi"}])[:1000]


def read_yaml(path: str) -> dict[str, Any]:
    from quire.config.file import read_options
    from quire.config.server import ServerConfig

    return read_options(path, [ServerConfig])


def read_keys(path: str) -> list[str]:
    from quire.api.server.keys import KeyFile

    return [key.label for key in KeyFile(path).read()]


def read_template(path: str) -> str | None:
    from quire.frontend.model import _template_source

    return _template_source(path)


def asked_for(folder: str) -> list[str]:
    return sorted(os.path.basename(path) for path in asked if os.path.dirname(path) == folder)


def main() -> None:
    lexists = os.path.lexists

    def watched(path: Any) -> bool:
        asked.add(os.fspath(path))
        return lexists(path)

    os.path.lexists = watched
    sys.addaudithook(lambda event, args: asked.add(str(args[0])) if event == "open" else None)
    for line in sys.stdin:
        job = json.loads(line)
        most_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        started = time.process_time()
        answer: dict[str, Any] = {"result": None, "error": None, "kind": None}
        try:
            answer["result"] = globals()[job.pop("do")](**job)
        except BaseException as error:
            answer |= {"error": str(error), "kind": [cls.__name__ for cls in type(error).__mro__]}
        answer["seconds"] = time.process_time() - started
        answer["grown_mb"] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - most_kb) / 1024
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
