"""LLM: the engine in one object, for programs and notebooks.

The public entry point for offline use, on which the CLI is written. Knows prompts and outputs; how they are made is
behind `frontend/`.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tqdm import tqdm

from quire.config import EngineConfig
from quire.errors import RequestError
from quire.frontend.chat import encode_chat
from quire.frontend.inproc import InprocClient
from quire.frontend.inputs import InputProcessor, Prompt
from quire.frontend.model import ModelInfo
from quire.frontend.requests import RequestState
from quire.frontend.tokenizer import Tokenizer
from quire.messages import Abort
from quire.outputs import RequestOutput
from quire.params import SamplingParams
from quire.utils.signals import interrupts_deferred

Messages = Sequence[Mapping[str, Any]]


class LLM:
    """`LLM("smollm2").generate(["Hello"], SamplingParams(max_tokens=20))`; options are those of `quire.config`."""

    def __init__(self, model: str = "smollm2", **options: Any) -> None:
        self._start(EngineConfig.from_kwargs(model=model, **options))

    @classmethod
    def from_config(cls, config: EngineConfig) -> "LLM":
        llm = cls.__new__(cls)
        llm._start(config)
        return llm

    def _start(self, config: EngineConfig) -> None:
        self.model = ModelInfo.open(config)
        self.inputs = InputProcessor(self.model)
        self.client: InprocClient | None = InprocClient(self.model.config)
        self.is_running = False  # whether a generator of `_run` has not reached its end
        self.request_ids = itertools.count()

    # -- asking --------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """One output per prompt, in their order. A prompt is text, token ids, or a dict with either."""
        all_prompts = _as_list(prompts)
        all_params = self._params_for(len(all_prompts), sampling_params)
        priorities = list(priority) if priority is not None else [0] * len(all_prompts)
        if len(priorities) != len(all_prompts):
            raise RequestError(f"{len(all_prompts)} prompts need as many priorities, not {len(priorities)}")
        # All are checked before the first is started.
        requests = [self._request(*each) for each in zip(all_prompts, all_params, priorities)]
        bar = tqdm(total=len(requests), desc="Requests", unit="req", disable=not use_tqdm, dynamic_ncols=True)
        with bar:
            for request in self._run(requests, bar):
                bar.update(request.finished)
        return [request.output() for request in requests]

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """One output per conversation; `template_options` as for `encode_chat`."""
        conversations = _as_conversations(messages)
        prompts = [self.encode_chat(conversation, **template_options) for conversation in conversations]
        return self.generate(prompts, sampling_params, use_tqdm)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """One request, as it grows: an output after every step that added to it."""
        request = self._request(prompt, self._params_for(1, sampling_params)[0], 0)
        for changed in self._run([request]):
            yield changed.output()

    def encode_chat(
        self,
        messages: Messages,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """The token ids of a conversation, by the model's chat template. Text of a message makes no special tokens."""
        return encode_chat(
            self.model.need_tokenizer("a chat"),
            self.model.template,
            messages,
            add_generation_prompt,
            continue_final_message,
            tools=tools,
            template_kwargs=chat_template_kwargs,
        )

    def get_tokenizer(self) -> Tokenizer:
        return self.model.need_tokenizer("this")

    def get_default_sampling_params(self) -> SamplingParams:
        return self.model.default_params()

    # -- living --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Frees weights and cache; the object cannot be used afterwards."""
        if self.client is not None:
            self.client.close()
            self.client = None

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # -- doing ---------------------------------------------------------------------------------------------------

    def _params_for(self, count: int, params: SamplingParams | Sequence[SamplingParams] | None) -> list[SamplingParams]:
        if params is None:
            params = self.model.default_params()
        if isinstance(params, SamplingParams):
            return [params] * count
        if len(params) != count:
            raise RequestError(f"{count} prompts need one SamplingParams or {count} of them, not {len(params)}")
        return list(params)

    def _request(self, prompt: Prompt, params: SamplingParams, priority: int) -> RequestState:
        return self.inputs.request(str(next(self.request_ids)), prompt, params, priority)

    def _run(self, requests: list[RequestState], bar: tqdm | None = None) -> Iterator[RequestState]:
        """Drives the core until all requests are finished; yields a request whenever it changed."""
        client = self.client
        if client is None:
            raise RequestError("this LLM is closed: make a new one")
        if self.is_running:
            raise RequestError(
                "this LLM is in the middle of a stream: read it to its end, or close() it, before you ask for more"
            )
        self.is_running = True
        live = {request.request_id: request for request in requests}
        num_tokens = 0
        try:
            with interrupts_deferred() as raise_if_interrupted:
                for request in requests:
                    client.prepare(request.message, lambda: self.model.vocabulary)
                    client.send(request.message)
                while live:
                    outputs = client.step()
                    raise_if_interrupted()
                    for delta in outputs.deltas:
                        changed = live.get(delta.request_id)
                        if changed is None:
                            continue  # it ended here before the core knew
                        error = client.apply_delta(changed, delta)
                        if error is not None:
                            raise error
                        num_tokens += len(delta.token_ids)
                        if changed.finished:
                            del live[changed.request_id]
                        yield changed
                    if bar is not None and num_tokens:
                        elapsed_s = max(bar.format_dict["elapsed"], 1e-9)
                        bar.set_postfix_str(f"{num_tokens / elapsed_s:.0f} tok/s", refresh=False)
        finally:
            self.is_running = False
            for request_id in live:  # stopped early: by Ctrl-C, an error, or a stream nobody reads any more
                client.send(Abort(request_id))


def _as_list(prompts: Any) -> list[Prompt]:
    """One prompt, or a sequence of them, as a list."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    is_token_ids = isinstance(prompts, Sequence) and bool(prompts) and isinstance(prompts[0], int)
    return [prompts] if is_token_ids else list(prompts)


def _as_conversations(messages: Any) -> list[Messages]:
    """One conversation, or a sequence of them, as a list."""
    is_one = not messages or isinstance(messages[0], Mapping)
    return [messages] if is_one else list(messages)
