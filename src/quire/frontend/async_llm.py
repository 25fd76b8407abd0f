"""AsyncLLM: the engine in a process of its own, for servers and asyncio programs.

Public. Requests are checked and tokenized here, off the event loop where that takes long; the core computes in another
process and is replaced when it dies, without any request noticing (`supervisor.py`). There may be several cores, among
which requests are divided (`cores.py`). Knows prompts and streams, not protocols.
"""

import asyncio
import functools
import uuid
from asyncio.subprocess import Process
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from quire.config import AsyncEngineArgs, EngineConfig, ServingConfig
from quire.errors import EngineError, OverloadedError
from quire.frontend.chat import encode_chat
from quire.frontend.core_client import end_process, start_process
from quire.frontend.cores import Cores
from quire.frontend.exchange import sleep_at
from quire.frontend.hf_tokenizer import HFTokenizer
from quire.frontend.inputs import InputProcessor, Prompt
from quire.frontend.model import ModelInfo
from quire.frontend.requests import RequestState
from quire.frontend.stream import Stream
from quire.frontend.suspension import Mode
from quire.messages import Check, EngineStats, ResetPrefixCache
from quire.metrics.serving import ServingMetrics
from quire.outputs import RequestOutput
from quire.params import RequestOutputKind, SamplingParams

Result = TypeVar("Result")

INLINE_CHARS = 1024  # texts, or token ids, up to here are worked on at once: handing them to a thread takes longer
LONG_CHARS = 65_536  # longer texts have a thread of their own: others do not wait for them
NUM_THREADS = 2
ASLEEP_RETRY_S = 10.0
MAX_TIMEOUT_S = 366 * 86_400.0


class AsyncLLM:
    """`async with AsyncLLM("smollm2") as llm: async for output in llm.generate("Hello"): …`

    The core starts with the first call of `generate`, unless `start` was called before.
    """

    def __init__(self, model: str = "smollm2", *, serving: ServingConfig | None = None, **options: Any) -> None:
        """`options`: those of `AsyncEngineArgs`; `serving`: the ones of serving, already made."""
        args = AsyncEngineArgs(model, **options)
        self._open(args.create_engine_config(), serving or args.create_serving_config())

    @classmethod
    def from_config(cls, config: EngineConfig, serving: ServingConfig) -> "AsyncLLM":
        """Opens the model's files (fast, no weights); nothing runs before `start`."""
        llm = cls.__new__(cls)
        llm._open(config, serving)
        return llm

    @classmethod
    def from_engine_args(cls, engine_args: AsyncEngineArgs) -> "AsyncLLM":
        return cls.from_config(engine_args.create_engine_config(), engine_args.create_serving_config())

    @classmethod
    async def open(cls, config: EngineConfig, serving: ServingConfig) -> "AsyncLLM":
        """As `from_config`, while the cores' processes import what they need: a second sooner."""
        processes = [await start_process(config) for _ in range(config.parallel.num_engines)]
        try:
            llm = await asyncio.to_thread(cls.from_config, config, serving)
        except BaseException:
            await asyncio.gather(*map(end_process, processes))
            raise
        llm.processes = processes
        return llm

    def _open(self, config: EngineConfig, serving: ServingConfig) -> None:
        self.serving = serving
        self.model = ModelInfo.open(config, serving=True)
        self.model.prepare()
        self.inputs = InputProcessor(self.model, serving)
        self.metrics = ServingMetrics(config.model.model, _engine_names(config))
        self.threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="tokenize")
        self.long_texts = ThreadPoolExecutor(1, thread_name_prefix="tokenize-long")
        self.processes: list[Process] = []  # the first cores', if they were started ahead
        self.cores: Cores | None = None
        self.accepting = True
        self._start_lock = asyncio.Lock()

    # -- living --------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Starts all cores and returns when they answer; raises what kept one from that (ConfigError, ModelError…)."""
        self.cores = Cores(self.model.config, self.serving, self.metrics, lambda: self.model.vocabulary, self.processes)
        await self.cores.start()

    async def _started(self) -> Cores:
        async with self._start_lock:
            if self.cores is None:
                await self.start()
        return self._require_cores()

    def _require_cores(self) -> Cores:
        if self.cores is None:
            raise OverloadedError("the engine is starting: try again in a moment")
        return self.cores

    async def drain(self, timeout_s: float) -> None:
        """Takes no more requests and waits for those there are; what is left after `timeout_s` is aborted."""
        self.accepting = False
        if self.cores is None:
            return
        now = asyncio.get_running_loop().time
        deadline = now() + timeout_s
        while self.cores.num_live and now() < deadline:
            await asyncio.sleep(0.02)
        for stream in list(self.cores.live.values()):
            stream.abort()

    async def close(self) -> None:
        """Stops all cores; streams still open end with EngineError."""
        self.accepting = False
        if self.cores is not None:
            await self.cores.close()
        self.threads.shutdown(wait=False, cancel_futures=True)
        self.long_texts.shutdown(wait=False, cancel_futures=True)

    def shutdown(self, timeout: float | None = None) -> None:
        """As `close`, at once: for callers that cannot wait, so `timeout` has no effect."""
        self.accepting = False
        if self.cores is not None:
            self.cores.kill()
        self.threads.shutdown(wait=False, cancel_futures=True)
        self.long_texts.shutdown(wait=False, cancel_futures=True)

    async def __aenter__(self) -> "AsyncLLM":
        await self._started()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    def health(self) -> str | None:
        """None while a core is there and makes progress; else one sentence that says what is wrong.

        Of several, one is enough: it takes the requests."""
        if self.cores is None:
            return "the engine is starting"
        return self.cores.health() if self.accepting else "the server is stopping"

    async def check_health(self) -> None:
        """Raises EngineError if something is wrong with an engine that was started."""
        problem = self.health() if self.cores is not None else None
        if problem is not None:
            raise EngineError(problem)

    async def check(self) -> str:
        """What is wrong with the cores' books, for soaks; empty if nothing is."""
        return await self.cores.ask(Check()) if self.cores is not None else "the engine is starting"

    async def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forgets what is cached of prompts; False if a core did not, because requests run there.

        `reset_running_requests`: forget it all the same; they compute their tokens again. `reset_connector` has no
        effect: there is no other cache.
        """
        cores = await self._started()
        return not await cores.ask(ResetPrefixCache(reset_running_requests))

    async def sleep(self, level: int = 1, mode: Mode = "abort") -> None:
        """Gives the device's memory back until `wake_up`; meanwhile requests are turned away.

        Level 1 keeps weights in the host's memory, where the device has its own; level 2 forgets them, and they are
        read again. `mode`: running requests are aborted, waited for, or kept, and go on when it wakes up.
        """
        await (await self._started()).sleep(sleep_at(level), mode)

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """`tags` has no effect: weights and cache come back together."""
        await (await self._started()).wake_up()

    async def pause_generation(self, *, mode: Mode = "abort", clear_cache: bool = True) -> None:
        """Lets new requests wait until `resume_generation`. Those that run are aborted, waited for, or kept as they
        are; unless they are kept, cached prompts are forgotten then."""
        await (await self._started()).pause(mode)
        if clear_cache and mode != "keep":
            await self.reset_prefix_cache()

    async def resume_generation(self) -> None:
        await (await self._started()).resume()

    async def is_paused(self) -> bool:
        return self.cores is not None and self.cores.paused

    async def is_sleeping(self) -> bool:
        return self.cores is not None and self.cores.state != "awake"

    @property
    def is_running(self) -> bool:
        return self.cores is None or (self.accepting and not self.errored)

    @property
    def is_stopped(self) -> bool:
        return not self.is_running

    @property
    def errored(self) -> bool:
        return self.failure is not None

    @property
    def stats(self) -> EngineStats:
        return self.cores.stats if self.cores is not None else EngineStats()

    @property
    def num_restarts(self) -> int:
        return self.cores.num_restarts if self.cores is not None else 0

    @property
    def failure(self) -> Exception | None:
        """Set once the engine has given up for good."""
        return self.cores.failure if self.cores is not None else None

    # -- asking --------------------------------------------------------------------------------------------------

    async def submit(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        timeout_s: float | None = None,
        thinks: bool = False,
        owner: str = "",
        wants_vector: bool = False,
        prediction: str = "",
    ) -> Stream:
        """Starts a request. RequestError: it is wrong. OverloadedError: the queue is full. EngineError: giving up.

        `owner`: a digest of the sender's API key; a request that made the engine fail is refused to its owner alone.
        `wants_vector`: the stream's request gets the prompt's vector instead of an answer. `prediction`: a text that
        the answer may be like, which makes it faster.
        """
        cores = self._admit()
        name = request_id or uuid.uuid4().hex

        def make() -> tuple[RequestState, list[int]]:
            request = self.inputs.request(
                name, prompt, params, priority, cache_salt, thinks, owner, wants_vector, prediction
            )
            return request, cores.prefix(request)

        size = _size(prompt) + _size(params.bad_words) + len(prediction)  # all of them are tokenized
        is_long = size > INLINE_CHARS or params.structured_outputs is not None
        request, prefix = await self.off_loop(make, size) if is_long else make()
        cores = self._admit()  # again: others may have come meanwhile
        timeouts = [limit for limit in (timeout_s, self.serving.request_timeout_s) if limit is not None]
        expires_at = None
        if timeouts:
            expires_at = asyncio.get_running_loop().time() + min(*timeouts, MAX_TIMEOUT_S)
        return cores.add(request, prefix, expires_at)

    def _admit(self) -> Cores:
        """Who takes one more request; OverloadedError if none may be started now."""
        cores = self._require_cores()
        if (state := cores.state) != "awake":
            raise OverloadedError(f"the engine is {state}: try again later", retry_after_s=ASLEEP_RETRY_S)
        if not self.accepting:
            raise OverloadedError("the server is stopping: try another one", retry_after_s=10)
        limit = self.serving.max_queued_requests
        if cores.num_live >= limit:
            self.metrics.rejected("queue_full")
            raise OverloadedError(
                f"{limit} requests are running or waiting, which is the limit: try again later",
                hint="--max-queued-requests",
            )
        return cores

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        **options: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """One request, as it grows: an output after every step that added to it, by the parameters' `output_kind`.

        `options` are those of `submit`. Whoever stops early ends the request.
        """
        await self._started()
        params = sampling_params or self.model.default_params()
        options.setdefault("thinks", self.model.reasoning_format is not None)
        stream = await self.submit(prompt, params, request_id=request_id, priority=priority, **options)
        try:
            if params.output_kind is RequestOutputKind.FINAL_ONLY:
                yield (await stream.wait()).output()
                return
            async for updates in stream:
                yield stream.request.output(updates)
        finally:
            stream.abort()

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Ends requests, whose streams then stop with finish_reason "abort"; unknown ids are ignored."""
        live = self.cores.live if self.cores is not None else {}
        for each in [request_id] if isinstance(request_id, str) else list(request_id):
            if (stream := live.get(each)) is not None:
                stream.abort()

    # -- text ----------------------------------------------------------------------------------------------------

    def get_tokenizer(self) -> HFTokenizer:
        return HFTokenizer(self.model.need_tokenizer("this"), self.model.template)

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        max_tokens: int | None = None,
    ) -> list[int]:
        """The token ids of a conversation, by the model's chat template.

        One that is certain to have `max_tokens` (None: as many as the context) is refused before it is tokenized."""
        encode = functools.partial(
            encode_chat,
            self.model.need_tokenizer("a chat"),
            self.model.template,
            messages,
            add_generation_prompt,
            continue_final_message,
            tools=tools,
            template_kwargs=chat_template_kwargs,
            max_tokens=max_tokens or self.model.max_model_len,
        )
        return await self.off_loop(encode, _size(messages))

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        encode = functools.partial(self.inputs.encode, text, add_special_tokens)
        return await self.off_loop(encode, len(text)) if len(text) > INLINE_CHARS else encode()

    async def decode(self, token_ids: Sequence[int]) -> str:
        decode = functools.partial(self.model.need_tokenizer("text").decode, list(token_ids), skip_special_tokens=False)
        return await self.off_loop(decode) if len(token_ids) > INLINE_CHARS else decode()

    async def off_loop(self, work: Callable[[], Result], num_chars: int = 0) -> Result:
        """Has a thread do what would hold up the event loop; long texts wait for each other only."""
        threads = self.long_texts if num_chars > LONG_CHARS else self.threads
        return await asyncio.get_running_loop().run_in_executor(threads, work)


AsyncLLMEngine = AsyncLLM  # vLLM's older name


def _engine_names(config: EngineConfig) -> list[str]:
    """As metrics call them: by number, or by the rank of the only one of this server."""
    parallel = config.parallel
    first = parallel.data_parallel_rank or 0
    return [str(first + idx) for idx in range(parallel.num_engines)]


def _size(prompt: Any) -> int:
    """Characters or token ids of a prompt in any of its forms, or of messages; 0 for what is neither."""
    if isinstance(prompt, Mapping):
        keys = ("prompt_token_ids", "prompt", "content", "text")
        prompt = next((prompt[key] for key in keys if key in prompt), None)
    if isinstance(prompt, str):
        return len(prompt)
    if not isinstance(prompt, Sequence) or not prompt:
        return 0
    return len(prompt) if isinstance(prompt[0], int) else sum(_size(part) for part in prompt)
