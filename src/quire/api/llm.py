"""LLM: the engine in one object, for programs and notebooks.

The public entry point for offline use, on which the CLI is written. Knows prompts and outputs; how they are made is
behind `frontend/`.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, get_args

from tqdm import tqdm

from quire.api.beam_search import BeamSearch
from quire.config import EngineArgs, EngineConfig
from quire.errors import ConfigError, RequestError
from quire.frontend.chat import ChatTemplate, ContentFormat, encode_chat
from quire.frontend.exchange import sleep_at
from quire.frontend.hf_tokenizer import HFTokenizer
from quire.frontend.inproc import InprocClient
from quire.frontend.inputs import InputProcessor, Prompt, TokensPrompt
from quire.frontend.model import ModelInfo
from quire.frontend.requests import RequestState
from quire.frontend.tokenizer import Tokenizer
from quire.messages import Abort, ChoiceDelta, ResetPrefixCache, WakeUp
from quire.metrics.reader import Metric, snapshot
from quire.metrics.serving import ServingMetrics
from quire.outputs import BeamSearchOutput, RequestOutput
from quire.params import BeamSearchParams, SamplingParams
from quire.utils.attributes import Attributes
from quire.utils.signals import interrupts_deferred

Messages = Sequence[Mapping[str, Any]]
Progress = bool | Callable[..., tqdm]  # whether there is a progress bar, or what makes one
Priority = int | Sequence[int] | None  # of all prompts, or of each; lower runs earlier


class LLM:
    """`LLM("smollm2").generate(["Hello"], SamplingParams(max_tokens=20))`; options are those of `quire.config`."""

    def __init__(self, model: str = "smollm2", **options: Any) -> None:
        self._start(EngineConfig.from_kwargs(model=model, **options))

    @classmethod
    def from_config(cls, config: EngineConfig) -> "LLM":
        llm = cls.__new__(cls)
        llm._start(config)
        return llm

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> "LLM":
        return cls.from_config(engine_args.create_engine_config())

    def _start(self, config: EngineConfig) -> None:
        if config.parallel.num_engines > 1:
            raise ConfigError(
                f"an LLM has one engine, not data_parallel_size={config.parallel.data_parallel_size}: "
                "use AsyncLLM or quire serve, which divide requests among several"
            )
        self.model = ModelInfo.open(config)
        self.model_config = ModelView(config.model.model, self.model)
        self.inputs = InputProcessor(self.model)
        self.metrics = ServingMetrics(config.model.model)
        self.queued: list[RequestState] = []  # by `enqueue`
        self.client: InprocClient | None = InprocClient(self.model.config)
        self.is_running = False  # whether a generator of `_run` has not reached its end
        self.request_ids = itertools.count()

    # -- asking --------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: Progress = True,
        lora_request: None = None,
        priority: Priority = None,
    ) -> list[RequestOutput]:
        """One output per prompt, in their order. A prompt is text, token ids, or a dict with either."""
        return self._finish(self._requests(prompts, sampling_params, lora_request, priority), use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: Progress = True,
        lora_request: None = None,
        priority: Priority = None,
        chat_template: str | None = None,
        chat_template_content_format: ContentFormat = "auto",
        **template_options: Any,
    ) -> list[RequestOutput]:
        """One output per conversation. `chat_template`: a Jinja template instead of the model's own.

        `template_options` as for `encode_chat`.
        """
        prompts = self._chat_prompts(messages, chat_template, chat_template_content_format, template_options)
        return self.generate(prompts, sampling_params, use_tqdm, lora_request, priority)

    def enqueue(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        lora_request: None = None,
        priority: Priority = None,
        use_tqdm: Progress = True,
    ) -> list[str]:
        """Takes requests in, which `wait_for_completion` runs; returns their ids."""
        requests = self._requests(prompts, sampling_params, lora_request, priority)
        self.queued += requests
        return [request.request_id for request in requests]

    def enqueue_chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        lora_request: None = None,
        priority: Priority = None,
        chat_template: str | None = None,
        chat_template_content_format: ContentFormat = "auto",
        use_tqdm: Progress = True,
        **template_options: Any,
    ) -> list[str]:
        prompts = self._chat_prompts(messages, chat_template, chat_template_content_format, template_options)
        return self.enqueue(prompts, sampling_params, lora_request, priority)

    def wait_for_completion(self, output_type: object = None, *, use_tqdm: Progress = True) -> list[RequestOutput]:
        """Runs what was enqueued; one output per request, in their order. `output_type` has no effect."""
        requests, self.queued = self.queued, []
        return self._finish(requests, use_tqdm)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        lora_request: None = None,
        use_tqdm: Progress = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """The most likely answers to each prompt, best first. `concurrency_limit`: prompts that run at once."""
        _refuse_adapters(lora_request)
        all_ids = [self.inputs.tokenize(prompt)[1] for prompt in _as_list(prompts)]
        at_once = concurrency_limit or max(1, len(all_ids))
        tokenizer = self.model.tokenizer
        outputs: list[BeamSearchOutput] = []
        with _bar(use_tqdm, len(all_ids), "Beam searches") as bar:
            for first in range(0, len(all_ids), at_once):
                some_ids = all_ids[first : first + at_once]
                search = BeamSearch(self.model, some_ids, params)
                while asked := search.asked():
                    search.take(self.generate(asked, search.step, False))
                outputs += map(BeamSearchOutput, search.best())
                bar.update(len(some_ids))
        for sequence in (sequence for output in outputs for sequence in output.sequences):
            if tokenizer is not None:
                sequence.text = tokenizer.decode(sequence.tokens, params.skip_special_tokens)
        return outputs

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """One request, as it grows: an output after every step that added to it."""
        request = self._request(prompt, self._params_for(1, sampling_params)[0], 0)
        for changed in self._run([request]):
            yield changed.output(changed.updates())

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

    # -- knowing -------------------------------------------------------------------------------------------------

    def get_tokenizer(self) -> HFTokenizer:
        return HFTokenizer(self.model.need_tokenizer("this"), self.model.template)

    def get_default_sampling_params(self) -> SamplingParams:
        return self.model.default_params()

    def get_metrics(self) -> list[Metric]:
        """What a server's /metrics would show: objects of `quire.metrics.reader`."""
        return snapshot(self.metrics.collect())

    @property
    def llm_engine(self) -> "LLM":
        """For programs that read `llm.llm_engine.model_config`: here no other object is in between."""
        return self

    def collective_rpc(self, *_: Any, **__: Any) -> NoReturn:
        raise RequestError(
            "no function can be sent to the workers, which may be in other processes and take no code: "
            "write a logits processor, or change the model's file"
        )

    apply_model = collective_rpc

    def start_profile(self, *_: Any, **__: Any) -> NoReturn:
        raise RequestError(
            "there is no profiler inside the engine: put torch.profiler around generate(), or use "
            "benchmarks/gpu_profile.py"
        )

    stop_profile = start_profile

    # -- living --------------------------------------------------------------------------------------------------

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forgets what is cached of prompts; False, and nothing is forgotten, in the middle of a stream.

        `reset_running_requests`: forget it all the same; they compute their tokens again. `reset_connector` has no
        effect: there is no other cache.
        """
        return not self._require_client().ask(ResetPrefixCache(reset_running_requests))

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Gives the device's memory back until `wake_up`.

        Level 1 keeps weights in the host's memory, where the device has its own; level 2 forgets them, and they are
        read again. Nothing runs between two calls here, so `mode` has no effect.
        """
        if self.is_running:
            raise RequestError("this LLM is in the middle of a stream: read it to its end before it sleeps")
        self._require_client().ask(sleep_at(level))

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """`tags` has no effect: weights and cache come back together."""
        self._require_client().ask(WakeUp())

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

    def _require_client(self) -> InprocClient:
        if self.client is None:
            raise RequestError("this LLM is closed: make a new one")
        return self.client

    def _request(self, prompt: Prompt, params: SamplingParams, priority: int) -> RequestState:
        thinks = self.model.reasoning_format is not None
        return self.inputs.request(str(next(self.request_ids)), prompt, params, priority, thinks=thinks)

    def _requests(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        lora_request: None,
        priority: Priority,
    ) -> list[RequestState]:
        """All of them are checked before the first is started."""
        _refuse_adapters(lora_request)
        all_prompts = _as_list(prompts)
        all_params = self._params_for(len(all_prompts), params)
        if priority is None or isinstance(priority, int):
            priority = [priority or 0] * len(all_prompts)
        priorities = list(priority)
        if len(priorities) != len(all_prompts):
            raise RequestError(f"{len(all_prompts)} prompts need as many priorities, not {len(priorities)}")
        return [self._request(*each) for each in zip(all_prompts, all_params, priorities)]

    def _chat_prompts(
        self,
        messages: Messages | Sequence[Messages],
        chat_template: str | None,
        content_format: ContentFormat,
        template_options: dict[str, Any],
    ) -> list[Prompt]:
        """Conversations as token ids, with the text that they are."""
        if content_format not in get_args(ContentFormat):
            message = f"chat_template_content_format must be auto, string or openai, not {content_format!r:.40}"
            raise RequestError(message, "chat_template_content_format")
        tokenizer = self.model.need_tokenizer("a chat")
        template = self.model.template
        if chat_template is not None or content_format != "auto":
            source = chat_template if chat_template is not None else template.source
            template = ChatTemplate.of(tokenizer, source, content_format)
        return [_chat_prompt(tokenizer, template, each, **template_options) for each in _as_conversations(messages)]

    def _finish(self, requests: list[RequestState], use_tqdm: Progress) -> list[RequestOutput]:
        with _bar(use_tqdm, len(requests), "Requests") as bar:
            for request in self._run(requests, bar):
                bar.update(request.finished)
        return [request.output() for request in requests]

    def _run(self, requests: list[RequestState], bar: tqdm | None = None) -> Iterator[RequestState]:
        """Drives the core until all requests are finished; yields a request whenever it changed."""
        client = self._require_client()
        if client.engine.is_asleep:
            raise RequestError("this LLM is asleep: call wake_up() first")
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
                    before = num_tokens
                    for delta in outputs.deltas:
                        changed = live.get(delta.request_id)
                        if changed is None:
                            continue  # it ended here before the core knew
                        self._apply_delta(client, changed, delta)
                        num_tokens += len(delta.token_ids)
                        if changed.finished:
                            del live[changed.request_id]
                        yield changed
                    self.metrics.engines[0].step(outputs.stats, outputs.step_s, num_tokens - before)
                    if bar is not None and num_tokens:
                        elapsed_s = max(bar.format_dict["elapsed"], 1e-9)
                        bar.set_postfix_str(f"{num_tokens / elapsed_s:.0f} tok/s", refresh=False)
        finally:
            self.is_running = False
            for request_id, request in live.items():  # stopped early: by Ctrl-C, an error, or a reader who left
                client.send(Abort(request_id))
                self.metrics.engines[0].finished(request, "abort")

    def _apply_delta(self, client: InprocClient, request: RequestState, delta: ChoiceDelta) -> None:
        had_no_token = not request.metrics.first_token_ts
        error = client.apply_delta(request, delta)
        if error is not None:
            raise error
        if had_no_token and delta.token_ids:
            self.metrics.engines[0].first_token(request)
        if request.finished:
            self.metrics.engines[0].finished(request)


class ModelView:
    """What programs read of `llm.model_config`."""

    def __init__(self, name: str, model: ModelInfo) -> None:
        self.model = name
        self.tokenizer = model.config.model.tokenizer or name
        self.dtype = model.config.model.dtype
        self.seed = model.config.model.seed
        self.max_model_len = model.max_model_len
        self.hf_config = Attributes(model.hf_config)

    def get_vocab_size(self) -> int:
        return self.hf_config["vocab_size"]


def _bar(use_tqdm: Progress, total: int, what: str) -> tqdm:
    make = use_tqdm if callable(use_tqdm) else tqdm
    return make(total=total, desc=what, unit="req", disable=not use_tqdm, dynamic_ncols=True)


def _refuse_adapters(lora_request: object) -> None:
    if lora_request is not None:
        raise RequestError("LoRA adapters are not supported: merge the adapter into the model's weights")


def _chat_prompt(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: Messages,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> TokensPrompt:
    """A conversation as token ids, with the text that they are."""
    options = add_generation_prompt, continue_final_message, tools, chat_template_kwargs
    token_ids = encode_chat(tokenizer, template, messages, *options)
    return TokensPrompt(prompt_token_ids=token_ids, prompt=template.render(messages, *options))


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
