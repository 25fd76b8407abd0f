"""AsyncLLM: the engine in a process of its own, for servers and asyncio programs.

Public. Requests are checked and tokenized here, off the event loop where that takes long; the core computes in another process
and is replaced when it dies, without any request noticing (`frontend/supervisor.py`). Knows prompts and streams, not protocols.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from quire.config import EngineConfig, ServingConfig
from quire.frontend.inputs import Prompt
from quire.frontend.model import Model
from quire.frontend.requests import ChoiceUpdate, RequestState
from quire.messages import EngineStats
from quire.outputs import RequestOutput
from quire.params import SamplingParams


class Stream:
    """One live request, read by one task. Iterating gives what was added since the last read, one list per wake-up:
    a reader that keeps up gets one per step, a slow one gets several steps merged, so what waits for it is bounded.

    Raises DeadlineError, PoisonError or EngineError where the request could not be finished. Leaving the loop early, or
    `abort()`, frees the request in the core within one step.
    """

    request: RequestState  # prompt_token_ids, metrics, prompt_logprobs, choices, output()

    def __aiter__(self) -> AsyncIterator[list[ChoiceUpdate]]: ...

    def abort(self) -> None: ...


class AsyncLLM:
    """`async with AsyncLLM("smollm2") as llm: async for output in llm.generate("Hello"): …`"""

    model: Model  # config, tokenizer, template, default_params(), max_model_len
    stats: EngineStats  # the core's last word
    num_restarts: int

    def __init__(self, model: str = "smollm2", *, serving: ServingConfig = ServingConfig(), **options: Any) -> None: ...

    @classmethod
    def from_config(cls, config: EngineConfig, serving: ServingConfig) -> "AsyncLLM":
        """Opens the model's files (fast, no weights); nothing runs before `start`."""

    async def start(self) -> None:
        """Starts the core and returns when it answers; raises what kept it from starting (ConfigError, ModelError…)."""

    async def submit(
        self, prompt: Prompt, params: SamplingParams, *, request_id: str | None = None, priority: int = 0,
        cache_salt: str = "", timeout_s: float | None = None,
    ) -> Stream:  # fmt: skip
        """Starts a request. RequestError: it is wrong. OverloadedError: the queue is full. EngineError: giving up."""

    def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, *, request_id: str | None = None, **options: Any
    ) -> AsyncIterator[RequestOutput]:
        """One request, as it grows: an output (all of it so far) after every step that added to it."""

    async def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:  # fmt: skip
        """Token ids of a conversation."""

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    async def decode(self, token_ids: Sequence[int]) -> str: ...

    def abort(self, request_id: str) -> None:
        """Ends a request, whose stream then stops; unknown ids are ignored."""

    def health(self) -> str | None:
        """None while a core is there and makes progress; else one sentence that says what is wrong."""

    async def drain(self, timeout_s: float) -> None:
        """Takes no more requests and waits for those there are; what is left after `timeout_s` is aborted."""

    async def close(self) -> None:
        """Stops the core; streams still open end with EngineError."""
