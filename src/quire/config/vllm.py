"""vLLM's options that are not ours by the same name: what each of them becomes here, in one table.

Used wherever options come in (`flags.py`, `file.py`, `LLM(**options)`), so that a command line or a program written for
vLLM works, or is told why not. `docs/from-vllm.md` is generated from it. Knows names and words, no values of ours.

In the lists of names, `name?` is a switch, `name*` takes several values, any other takes one. `name=1|2` says which
values change nothing, beside none at all: those are always accepted.
"""

import contextlib
import functools
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from quire.errors import ConfigError

log = logging.getLogger(__name__)

Kind = Literal["switch", "value", "list"]
OFF = ("false", "off", "none", "", "[]", "{}", "()")


@dataclass(frozen=True)
class Foreign:
    """An option of vLLM's that is not ours by the same name."""

    name: str
    kind: Kind
    reason: str  # why it is refused, or has no effect
    neutral: tuple[str, ...] = ()  # values that change nothing
    is_refused: bool = False
    becomes: str = ""  # the option of ours that it is
    value: Any = None  # which that option gets, instead of what was given


# What vLLM needs to be told, and Quire does by itself or has no use for.
WITHOUT_EFFECT = {
    "code of a checkpoint is never run: models are files of quire/models, or transformers' own": (
        "trust_remote_code? code_revision model_impl"
    ),
    "nothing is compiled ahead, and steps are recorded while the server runs": (
        "enforce_eager? compilation_config cudagraph_capture_sizes* max_cudagraph_capture_size max_seq_len_to_capture "
        "optimization_level performance_mode ir_op_priority use_inductor? enable_flashinfer_autotune? jit_monitor_mode "
        "jit_monitor_verbose? disable_async_output_proc? cudagraph_metrics? kernel_config attention_config"
    ),
    "kernels are chosen for the machine: see quire info": (
        "moe_backend linear_backend mamba_backend mamba_ssu_algorithm sparse_indexer_topk_backend gdn_prefill_backend "
        "kda_prefill_backend kda_decode_backend disable_cascade_attn? use_fp64_gumbel? disable_custom_all_reduce? "
        "enable_batch_sharded_sampling?"
    ),
    "prompts are always computed in chunks, beside the answers of others": (
        "enable_chunked_prefill? long_prefill_token_threshold long_prefill_token_threshold_adaptive? "
        "max_long_partial_prefills max_num_partial_prefills scheduler_reserve_full_isl? prefill_schedule_interval "
        "watermark scheduler_delay_factor"
    ),
    "steps always overlap: see --pipeline-depth": "async_scheduling? num_scheduler_steps multi_step_stream_outputs?",
    "a preempted request is computed again": "swap_space preemption_mode",
    "layers with different caches always share one pool": (
        "disable_hybrid_kv_cache_manager? kv_sharing_fast_prefill? swa_bounded_replay? use_v2_block_manager?"
    ),
    "blocks are always named by SHA-256, and the least recently used is forgotten first": (
        "prefix_caching_hash_algo prefix_cache_retention_interval prefix_match_unit"
    ),
    "files are read the fastest way there is": (
        "safetensors_load_strategy safetensors_prefetch_num_threads safetensors_prefetch_block_size "
        "model_loader_extra_config ignore_patterns use_tqdm_on_load? pt_load_map_location max_parallel_loading_workers "
        "config_format"
    ),
    "the tokenizer is always the fast one": "tokenizer_mode=auto|fast|slow|hf tokenizer_pool_size renderer_num_workers",
    "tool calls are read wherever the model's format is known": "enable_auto_tool_choice?",
    "thinking is told apart wherever the model's format is known": "enable_reasoning?",
    "this is always so": (
        "enable_prompt_tokens_details? enable_request_id_headers? enable_server_load_tracking? "
        "enable_tokenizer_info_endpoint? enable_sleep_mode? disable_frontend_multiprocessing? "
        "enable_cumem_allocator? enable_offline_docs? aggregate_engine_logging? fail_on_environ_validation?"
    ),
    "prompts are never logged unless --log-requests says so": "disable_log_requests? max_log_len enable_log_deltas?",
    "traces always tell queue, prefill, decode and parsing apart": "collect_detailed_traces*",
    "the status line and /metrics cost nothing worth saving": "disable_log_stats?",
    "/docs and /openapi.json need a key wherever other paths do": "disable_fastapi_docs?",
    "a reader that keeps up gets every token at once, for others events merge": "stream_interval",
    "no media are taken in yet": (
        "limit_mm_per_prompt allowed_local_media_path allowed_media_domains* media_io_kwargs mm_processor_kwargs "
        "mm_processor_cache_gb mm_processor_cache_type mm_hasher_algorithm mm_shm_cache_max_object_size_mb "
        "mm_encoder_only? mm_encoder_tp_mode mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path "
        "mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin interleave_mm_strings? skip_mm_profiling? "
        "video_pruning_rate video_pruning_method mm_tensor_ipc mm_processor_device mm_ipc_gpu_memory_gb "
        "mm_device_do_normalize? enable_mm_processor_stats? disable_chunked_mm_input? language_model_only? "
        "enable_mm_embeds? trust_request_mm_kwargs? disable_mm_preprocessor_cache?"
    ),
    "there is no state of this kind yet": (
        "mamba_config mamba_cache_dtype mamba_ssm_cache_dtype mamba_block_size mamba_cache_mode "
        "mamba_cache_philox_rounds enable_mamba_cache_stochastic_rounding? enable_mamba_shared_prefix_checkpoint? "
        "replayssm_buffer_len use_replayssm?"
    ),
    "headers may have 32 KiB, bodies what --max-body-bytes says": "h11_max_incomplete_event_size h11_max_header_count",
    "pages may send any method and header once --allowed-origins lets them in": "allowed_methods* allowed_headers*",
    "answers to failed requests never hold a stack trace, the log always does": "log_error_stack?",
    "there is no such endpoint": (
        "cohere_is_reasoning_model? cohere_format anthropic_disabled_thinking_effort enable_flash_late_interaction? "
        "data_parallel_supervisor_port dp_supervisor_probe_interval_s dp_supervisor_probe_timeout_s "
        "dp_supervisor_probe_failure_threshold"
    ),
    "there is one way to quantize for each name": "allow_deprecated_quantization?",
}

# What would change what happens: accepted only with the value that changes nothing, else refused with these words.
REFUSED = {
    "a server starts all engines that --data-parallel-size says: leave it out": (
        "data_parallel_size_local data_parallel_start_rank data_parallel_address data_parallel_rpc_port"
    ),
    "for a balancer of your own start a server per engine, with --data-parallel-size and --data-parallel-rank": (
        "data_parallel_external_lb? data_parallel_hybrid_lb? data_parallel_multi_port_external_lb?"
    ),
    "devices divide layers and requests, not contexts or the experts of several engines: use -tp, -pp and -dp": (
        "decode_context_parallel_size=1 prefill_context_parallel_size=1 dcp_comm_backend "
        "dcp_q_replicate? dcp_kv_cache_interleave_size=1 cp_kv_cache_interleave_size=1 enable_hc_sp? "
        "enable_ep_weight_filter? all2all_backend=allgather_reducescatter enable_dbo? ubatch_size=0 "
        "enable_elastic_ep? elastic_ep_max_dp_size dbo_decode_token_threshold=32 dp_sync_interval=16 "
        "dbo_prefill_token_threshold=512 disable_nccl_for_dp_synchronization? enable_eplb? eplb_config "
        "expert_placement_strategy=linear enable_nccl_comm_suspend? distributed_timeout_seconds "
        "cpu_distributed_timeout_seconds enable_shm_tensor_arena?"
    ),
    "several machines are a Ray cluster: start quire on one of them, with --distributed-executor-backend ray": (
        "nnodes=1 node_rank=0 master_addr=127.0.0.1 master_port=29501 headless?"
    ),
    "a lost machine never ends the server: leave it out": "enable_fault_tolerance? fault_tolerance_config",
    "profiles of Ray's workers are not written: leave it out": "ray_workers_use_nsight?",
    "choose the card with CUDA_VISIBLE_DEVICES": "device_ids*",
    "bind the process with numactl": "numa_bind? numa_bind_nodes* numa_bind_cpus*",
    "one API process is enough for tens of thousands of tokens a second: leave it out": "api_server_count=1",
    "adapters are not supported yet: merge them into the weights": (
        "enable_lora? max_loras=1 max_lora_rank=16 lora_dtype=auto max_cpu_loras fully_sharded_loras? "
        "lora_target_modules* lora_modules* default_mm_loras enable_tower_connector_lora? specialize_active_lora? "
        "enable_mixed_moe_lora_format? enable_moe_shared_loras? max_lora_cls_labels lora_extra_vocab_size "
        "enable_prompt_adapter? max_prompt_adapters max_prompt_adapter_token"
    ),
    "weights and caches are kept on the device so far: leave it out, or lower --max-model-len": (
        "cpu_offload_gb=0 cpu_offload_params offload_backend=auto offload_group_size=0 offload_num_in_group=1 "
        "offload_prefetch_step=1 offload_params kv_offloading_size kv_offloading_backend=native kv_transfer_config "
        "kv_events_config ec_transfer_config ec_manager_config weight_transfer_config engram_config"
    ),
    "models that give vectors are not supported yet": (
        "runner=auto|generate convert=auto|none pooler_config task=auto|generate override_pooler_config"
    ),
    "config.json says what a model is: change it in a copy of the folder": (
        "hf_overrides hf_config_path model_class_overrides disable_sliding_window? rope_scaling rope_theta"
    ),
    "set the environment variable HF_TOKEN": "hf_token",
    "--revision is that of every file": "tokenizer_revision",
    "give the weights' path as the model": "model_weights",
    "quantization_config is read from the checkpoint: see --quantization": "quantization_config",
    "prompts are text or token ids": "enable_prompt_embeds? io_processor_plugin",
    "workers and schedulers are Quire's own": (
        "worker_cls=auto worker_extension_cls scheduler_cls additional_config aux_output_config diffusion_config "
        "watermark_config"
    ),
    "a format is a file of quire/frontend/tools or quire/frontend/reasoning": (
        "tool_parser_plugin reasoning_parser_plugin"
    ),
    "tool servers are not supported: run tools in the client": "tool_server",
    "what a tool's arguments must look like follows from its strict field": "tool_strict_level=auto",
    "a request says itself whether tools are shown": "exclude_tools_when_tool_choice_none?",
    "the operator chooses the template, with --chat-template": "trust_request_chat_template?",
    "answers are the assistant's": "response_role=assistant",
    "a request asks for this itself, with the field of that name": "return_tokens_as_token_ids?",
    "a request asks for this itself, with stream_options": "enable_force_include_usage?",
    "answers have no such field: /metrics has the times": (
        "enable_per_request_metrics? enable_return_routed_experts? return_sampling_mask? "
        "per_request_spec_decode_metrics=none"
    ),
    "outputs are never logged": "enable_log_outputs?",
    "put a proxy in front of the server": "middleware* allow_credentials? sse_keep_alive_interval=0 ssl_ciphers",
    "the fingerprint tells version and model": "fingerprint_mode=full|hash fingerprint_value",
    "only HTTP is spoken": "grpc? grpc_port tokens_only? enable_scale_out?",
    "profiles are not written: use /metrics, or benchmarks/gpu_profile.py": (
        "profiler_config enable_layerwise_nvtx_tracing? "
        "enable_mfu_metrics? enable_logging_iteration_details? kv_cache_metrics? kv_cache_metrics_sample "
        "show_hidden_metrics_for_version custom_histogram_buckets enable_trace_replay?"
    ),
    "use --log-format and --log-level": "logging_config log_config_file",
    "/live, /ready and /health are never logged, all else is: see --no-access-log": "disable_access_log_for_endpoints",
    "logprobs are those of the model, before sampling parameters change them": "logprobs_mode=raw_logprobs",
    "use --max-num-batched-tokens": "max_num_scheduled_tokens",
    "use --max-num-seqs": "max_num_active_seqs",
    "use --max-queued-requests": "max_num_queued_tokens",
    "how long a model may think is a field of requests, thinking_token_budget": "reasoning_config",
    "all layers keep their caches in one type": "kv_cache_dtype_skip_layers*",
    "all weights leave the card when the engine sleeps": (
        "sleep_mode_offload_cudagraph? sleep_preserve_parameter_names*"
    ),
}

# Other names of options of ours. A switch gives the value that stands there.
ALIASES: dict[str, tuple[str, Any]] = {
    "device_memory_utilization": ("gpu_memory_utilization", None),
    "executor": ("distributed_executor_backend", None),
    "guided_decoding_backend": ("structured_outputs_backend", None),
    "max_num_queued_reqs": ("max_queued_requests", None),
    "uvicorn_log_level": ("log_level", None),
    "enable_log_requests?": ("log_requests", True),
    "disable_uvicorn_access_log?": ("access_log", False),
    "structured_outputs_config": ("structured_outputs_backend", None),
}
JSON_ALIASES = ("structured_outputs_config",)  # objects, of which a part is an option of ours
SHORT = {  # vLLM's short flags
    "-tp": "tensor_parallel_size", "-pp": "pipeline_parallel_size", "-dp": "data_parallel_size",
    "-dcp": "decode_context_parallel_size", "-pcp": "prefill_context_parallel_size", "-dpn": "data_parallel_rank",
    "-dpr": "data_parallel_start_rank", "-dpl": "data_parallel_size_local", "-dpa": "data_parallel_address",
    "-dpp": "data_parallel_rpc_port", "-dpb": "data_parallel_backend", "-dph": "data_parallel_hybrid_lb",
    "-dpe": "data_parallel_external_lb", "-dpm": "data_parallel_multi_port_external_lb",
    "-ep": "enable_expert_parallel", "-n": "nnodes", "-r": "node_rank", "-asc": "api_server_count",
    "-cc": "compilation_config", "-ac": "attention_config", "-dc": "diffusion_config", "-q": "quantization",
}  # fmt: skip

# Other words for values of our options.
VALUES: dict[str, dict[Any, Any]] = {
    "dtype": {"half": "float16", "float": "float32"},
    "generation_config": {"vllm": "none"},
    "load_format": dict.fromkeys(
        ("safetensors", "hf", "pt", "mistral", "gguf", "fastsafetensors", "runai_streamer", "bitsandbytes"), "auto"
    ),
    "max_model_len": {-1: None, "-1": None, "auto": None},
    "endpoint": {"/v1/completions": "completions", "/v1/chat/completions": "chat"},
    "distributed_executor_backend": {"uni": "inproc", "mp": "multiproc"},
    "log_level": {"critical": "error", "trace": "debug"},
    "structured_outputs_backend": {"guidance": "llguidance", "outlines": "auto", "lm-format-enforcer": "auto"},
    "tool_call_parser": {
        "openai": "harmony", "pythonic": "llama_pythonic", "llama4_pythonic": "llama_pythonic",
        "llama4_json": "llama3_json", "phi4_mini_json": "phi4", "glm45": "glm4", "glm47": "glm4",
        "qwen3_json": "hermes", "granite4": "hermes", "qwen3_xml": "qwen3_coder", "step3p5": "qwen3_coder",
        "lfm2": "llama_pythonic", "hunyuan_a13b": "hunyuan",
    },
    "reasoning_parser": {
        "openai_gptoss": "harmony", "granite_thinking_parser": "granite", "hunyuan_a13b": "hunyuan",
        **dict.fromkeys(
            ("deepseek_r1", "deepseek_v3", "deepseek_v31", "qwen3", "glm45", "glm47", "minimax_m2",
             "minimax_m2_append_think", "nemotron_v3", "olmo3", "step3", "mimo", "holo2"),
            "think",
        ),
    },
    # Ours are chosen for the card: names of vLLM's kernels say what not even vLLM has everywhere.
    "attention_backend": dict.fromkeys(
        ("FLASH_ATTN", "TRITON_ATTN", "TORCH_SDPA", "CPU_ATTN", "FLEX_ATTENTION", "FLASHINFER_MLA", "TRITON_MLA",
         "CUTLASS_MLA", "FLASHMLA", "FLASH_ATTN_MLA", "CPU_MLA", "AMX_MLA"),
        "auto",
    ) | {"FLASHINFER": "flashinfer"},
}  # fmt: skip


def _entries(lists: Mapping[str, str], is_refused: bool) -> list[Foreign]:
    found = []
    for reason, names in lists.items():
        for entry in names.split():
            name, _, neutral = entry.partition("=")
            kind = kind_of(name)
            found.append(
                Foreign(name.rstrip("?*"), kind, reason, tuple(neutral.split("|")) if neutral else (), is_refused)
            )
    return found


def kind_of(name: str) -> Kind:
    return "switch" if name.endswith("?") else "list" if name.endswith("*") else "value"


@functools.cache
def foreign_options() -> dict[str, Foreign]:
    """All of them, by name."""
    aliases = [
        Foreign(name.rstrip("?*"), kind_of(name), "", becomes=becomes, value=value)
        for name, (becomes, value) in ALIASES.items()
    ]
    entries = [*_entries(WITHOUT_EFFECT, False), *_entries(REFUSED, True), *aliases]
    return {entry.name: entry for entry in entries}


def own_value(name: str, value: Any) -> Any:
    """A value of an option of ours, which may be given by a word of vLLM's."""
    words = VALUES.get(name)
    try:
        return words.get(value, value) if words else value
    except TypeError:  # not hashable: no word
        return value


def translated(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options without vLLM's: these become ours, or have no effect, or are refused (ConfigError)."""
    table = foreign_options()
    options = {name: own_value(name, value) for name, value in given.items() if name not in table}
    idle: dict[str, list[str]] = {}  # reason -> names
    for name in filter(table.__contains__, given):
        entry, value = table[name], given[name]
        if entry.becomes:
            _take_alias(entry, value, options)
        elif not _is_neutral(entry, value):
            if entry.is_refused:
                raise ConfigError(f"{name} is not supported: {entry.reason}")
            idle.setdefault(entry.reason, []).append(name)
    for reason, names in idle.items():
        log.warning("without effect here: %s (%s)", ", ".join(names), reason)
    return options


def _take_alias(entry: Foreign, value: Any, options: dict[str, Any]) -> None:
    if value is None:
        return
    if entry.name in JSON_ALIASES:
        value = _backend_of(value)
        if value is None:
            return
    elif entry.kind == "switch":
        value = entry.value if value else not entry.value
    if entry.becomes in options:
        raise ConfigError(f"{entry.name} is another name of {entry.becomes}: give one of them")
    options[entry.becomes] = own_value(entry.becomes, value)


def _backend_of(settings: Any) -> Any:
    """Of vLLM's `structured_outputs_config`, the part that is an option here."""
    if isinstance(settings, str):
        with contextlib.suppress(ValueError, RecursionError):
            settings = json.loads(settings)
    if not isinstance(settings, Mapping):
        raise ConfigError(f"structured_outputs_config must be a JSON object, not {settings!r:.40}")
    others = [name for name, value in settings.items() if name != "backend" and value not in (None, False, "", "auto")]
    if others:
        raise ConfigError(f"structured_outputs_config: {others[0]} is not supported: leave it out")
    return settings.get("backend")


def _is_neutral(entry: Foreign, value: Any) -> bool:
    """Whether a value changes nothing."""
    if value is None:
        return True
    word = str(value).lower()
    if entry.kind == "switch":
        return word in OFF
    if entry.kind == "list" and not value:
        return True
    return word in (OFF if not entry.neutral else (*OFF, *(neutral.lower() for neutral in entry.neutral)))
