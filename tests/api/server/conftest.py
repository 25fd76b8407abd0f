"""A real server for the real `openai` client: AsyncLLM with its core process, app, guard and uvicorn, on a thread."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import openai
import pytest
import uvicorn
from tokenizers.processors import TemplateProcessing

from quire.api.server.app import build_app, errors_of, policy_of
from quire.api.server.guard import Guard
from quire.config import ServingConfig
from quire.config.server import ServerConfig
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.tokenizer import Tokenizer
from tests.serving import until

NAMES = ["smol", "smol-alias"]


class Server:
    def __init__(self, url: str, llm: AsyncLLM, loop: asyncio.AbstractEventLoop) -> None:
        self.url = url
        self.llm = llm
        self.loop = loop
        self.options = {"base_url": url + "/v1", "api_key": "none", "max_retries": 0, "timeout": 60}

    def client(self, **options) -> openai.OpenAI:
        return openai.OpenAI(**{**self.options, **options})

    def async_client(self, **options) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(**{**self.options, **options})


@contextmanager
def serving(model: str, config: ServerConfig = ServerConfig(), **options) -> Iterator[Server]:
    started = threading.Event()
    failure = []
    http = None

    async def live() -> None:
        nonlocal http
        try:
            llm = AsyncLLM(model, **options)
            async with llm:
                app = Guard(build_app(llm, NAMES), policy_of, config, errors_of=errors_of)
                http = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning", ws="none"))
                http.found = llm, asyncio.get_running_loop()
                http.install_signal_handlers = lambda: None
                task = asyncio.create_task(http.serve())
                while not http.started and not task.done():
                    await asyncio.sleep(0.01)
                started.set()
                await task
        except BaseException as error:
            failure.append(error)
            raise
        finally:
            started.set()

    thread = threading.Thread(target=lambda: asyncio.run(live()), daemon=True)
    thread.start()
    assert started.wait(120) and not failure, failure
    try:
        port = http.servers[0].sockets[0].getsockname()[1]
        yield Server(f"http://127.0.0.1:{port}", *http.found)
    finally:
        http.should_exit = True
        thread.join(30)
        assert not thread.is_alive() and not failure, failure


@pytest.fixture(scope="session")
def smol(smollm2) -> Iterator[Server]:
    """The default model in float32: greedy text does not depend on who else runs."""
    options = {"dtype": "float32", "max_model_len": 512, "kv_cache_memory_bytes": 256 << 20, "num_threads": 1}
    with serving("smollm2", **options) as server:
        yield server


@pytest.fixture(scope="session")
def client(smol) -> openai.OpenAI:
    return smol.client()


@pytest.fixture(scope="session")
def with_bos(smollm2, tmp_path_factory) -> str:
    """The default model's tokenizer, saved as one that begins every text with a token of its own."""
    backend = Tokenizer.from_path(smollm2).backend
    backend.post_processor = TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)])
    path = tmp_path_factory.mktemp("with-bos") / "tokenizer.json"
    backend.save(str(path))
    return str(path)


@pytest.fixture(scope="session")
def echo(smollm2, with_bos) -> Iterator[Server]:
    """A model that repeats its prompt, 100 tokens a second, one request at a time, by priority.

    Its template takes arguments."""
    template = "{{ style }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{{ reasoning_effort }}"
    options = {"executor": "echo:100", "max_num_seqs": 1, "scheduling_policy": "priority", "max_model_len": 2048}
    serving_options = ServingConfig(max_queued_requests=4)
    with serving("smollm2", serving=serving_options, tokenizer=with_bos, chat_template=template, **options) as server:
        yield server


@pytest.fixture(autouse=True)
def nothing_is_left_running(request):
    """After each test the engine is idle: whatever a test left early was freed."""
    yield
    for name in {"smol", "echo"} & set(request.fixturenames):
        server = request.getfixturevalue(name)
        until(lambda llm=server.llm: not llm.cores.live, 2, "an idle engine")
