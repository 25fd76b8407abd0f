"""What `--speculative-config` says, read and checked: vLLM's keys, each honoured or refused by its name.

Used by the options class, when an engine is configured, and by those who draft and plan. Knows no devices.
"""

import difflib
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from quire.errors import ConfigError

METHODS = {
    "ngram": "ngram",
    "ngram_gpu": "ngram",
    "suffix": "suffix",
    "draft_model": "draft_model",
}  # vLLM's names -> files of spec/
DEFAULT_TOKENS = 7
DEFAULT_MODEL_TOKENS = 3  # each of which costs a step of the draft model
MAX_TOKENS = 128
LOOKUP_MIN, LOOKUP_MAX = 3, 5

# Other methods and keys of vLLM, which are refused with a word about them.
OTHER_METHODS = (
    "medusa", "mlp_speculator", "custom_class", "eagle", "eagle3", "mtp", "dflash", "dspark",
    "extract_hidden_states",
)  # fmt: skip
OTHER_KEYS = (
    "draft_tensor_parallel_size", "tensor_parallel_size", "revision", "code_revision",
    "draft_load_config", "max_model_len", "enforce_eager", "moe_backend", "attention_backend", "kv_cache_dtype",
    "parallel_drafting", "draft_sample_method", "use_local_argmax_reduction", "use_heterogeneous_vocab",
    "disable_padded_drafter_batch", "disable_eagle_block_drop", "index_share_for_mtp_iteration",
    "enable_adaptive_verification", "dspark_draft_topk", "target_model_config", "target_parallel_config",
    "draft_model_config", "draft_parallel_config",
)  # fmt: skip
KEYS_OF = {
    "draft_model": ("model", "quantization"),
    "ngram": ("prompt_lookup_min", "prompt_lookup_max"),
    "suffix": (
        "suffix_decoding_max_tree_depth",
        "suffix_decoding_max_cached_requests",
        "suffix_decoding_max_spec_factor",
        "suffix_decoding_min_token_prob",
    ),
}
OWN_KEYS = (
    "method",
    "num_speculative_tokens",
    "num_speculative_tokens_per_batch_size",
    "rejection_sample_method",
    "synthetic_acceptance_rates",
    "synthetic_acceptance_length",
    *(key for keys in KEYS_OF.values() for key in keys),
)


@dataclass(frozen=True)
class Speculation:
    """How the next tokens of requests are guessed: by the workers, or by the core."""

    method: str  # a file of spec/
    num_tokens: int  # that are guessed at once, at most
    model: str = ""  # a draft model's name or path
    quantization: str = "auto"  # its, as `--quantization`
    lookup_min: int = LOOKUP_MIN  # tokens at the end of a text that must have occurred before
    lookup_max: int = LOOKUP_MAX
    max_tree_depth: int = 24  # tokens at the end of a text that are compared, at most
    max_cached_requests: int = 10_000  # answers in which later requests find what follows
    max_spec_factor: float = 1.0  # tokens guessed for each that matches
    min_token_prob: float = 0.1  # of the last token that is guessed
    # (requests from here on, tokens guessed at once), by number of requests running; empty: by what a step can bear.
    by_batch_size: tuple[tuple[int, int], ...] = ()
    # For measuring: how often a draft counts as right if all before it did, by place; empty: if it is right.
    chances: tuple[float, ...] = ()

    @property
    def is_of_core(self) -> bool:
        return self.method == "suffix"


def read_speculation(settings: dict[str, Any]) -> Speculation:
    """The JSON of the option; ConfigError names the key that is wrong."""
    settings = {str(key).replace("-", "_"): value for key, value in settings.items()}
    for key in settings:
        if key in OTHER_KEYS:
            raise ConfigError(f"speculative_config: {key} is not supported: leave it out")
        if key not in OWN_KEYS:
            close = difflib.get_close_matches(key, OWN_KEYS, 1)
            hint = f": did you mean {close[0]}?" if close else f": choose from {', '.join(OWN_KEYS)}"
            raise ConfigError(f"speculative_config has no key {key!r:.60}{hint}")
    method = settings.get("method")
    if not isinstance(method, str) or method not in METHODS:
        known = ", ".join(METHODS)
        if method in OTHER_METHODS:
            raise ConfigError(f"speculative_config: the method {method} is not supported: choose from {known}")
        raise ConfigError(f"speculative_config needs a method: choose from {known}, not {method!r:.60}")
    for other, keys in KEYS_OF.items():
        for key in keys:
            if other != METHODS[method] and settings.get(key) is not None:
                raise ConfigError(
                    f"speculative_config: {key} is for the method {other}, not for {method}: leave it out"
                )
    if METHODS[method] == "draft_model" and not _text(settings, "model"):
        raise ConfigError("speculative_config: the method draft_model needs a model: the name or path of a small one")
    depth = _whole(settings, "suffix_decoding_max_tree_depth", 24, 1, MAX_TOKENS)
    default = {"suffix": depth, "draft_model": DEFAULT_MODEL_TOKENS}.get(METHODS[method], DEFAULT_TOKENS)
    num_tokens = _whole(settings, "num_speculative_tokens", default, 1, MAX_TOKENS)
    smallest, largest = settings.get("prompt_lookup_min"), settings.get("prompt_lookup_max")
    lookup_max = _whole(settings, "prompt_lookup_max", LOOKUP_MAX if smallest is None else smallest, 1, 64)
    lookup_min = _whole(settings, "prompt_lookup_min", LOOKUP_MIN if largest is None else largest, 1, 64)
    if lookup_min > lookup_max:
        raise ConfigError(
            f"speculative_config: prompt_lookup_min ({lookup_min}) is larger than prompt_lookup_max ({lookup_max})"
        )
    by_batch_size = _by_batch_size(settings.get("num_speculative_tokens_per_batch_size"), num_tokens)
    return Speculation(
        METHODS[method],
        num_tokens,
        _text(settings, "model"),
        _text(settings, "quantization") or "auto",
        lookup_min,
        lookup_max,
        depth,
        _whole(settings, "suffix_decoding_max_cached_requests", 10_000, 0, 10**9),
        _number(settings, "suffix_decoding_max_spec_factor", 1.0, 0, 1e6),
        _number(settings, "suffix_decoding_min_token_prob", 0.1, 0, 1),
        by_batch_size,
        _chances(settings, METHODS[method], num_tokens),
    )


def _chances(settings: dict[str, Any], method: str, num_tokens: int) -> tuple[float, ...]:
    """vLLM's synthetic acceptance: how many reach each place, or how many tokens a step gives on average."""
    rule = settings.get("rejection_sample_method") or "standard"
    rates, length = settings.get("synthetic_acceptance_rates"), settings.get("synthetic_acceptance_length")
    if rule == "standard":
        if rates is not None or length is not None:
            raise ConfigError('speculative_config: synthetic acceptance needs "rejection_sample_method": "synthetic"')
        return ()
    if rule != "synthetic":
        raise ConfigError(f"speculative_config: rejection_sample_method is standard or synthetic, not {rule!r:.40}")
    if method != "ngram":
        raise ConfigError(f"speculative_config: synthetic acceptance needs the method ngram, not {method}")
    if (rates is None) == (length is None):
        raise ConfigError(
            "speculative_config: synthetic acceptance needs either synthetic_acceptance_rates or "
            "synthetic_acceptance_length"
        )
    if length is not None:
        return (
            _constant_chance(_number(settings, "synthetic_acceptance_length", 1, 1, num_tokens + 1), num_tokens),
        ) * num_tokens
    rates = list(rates) if isinstance(rates, list | tuple) else []
    if len(rates) != num_tokens or not all(type(rate) in (int, float) and 0 <= rate <= 1 for rate in rates):
        raise ConfigError(
            f"speculative_config: synthetic_acceptance_rates must be {num_tokens} numbers from 0 to 1, one per place"
        )
    if any(later > earlier for earlier, later in pairwise(rates)):
        raise ConfigError("speculative_config: synthetic_acceptance_rates must not go up from place to place")
    return tuple(later / earlier if earlier else 0.0 for earlier, later in pairwise([1.0, *rates]))


def _constant_chance(num_tokens: float, num_drafts: int) -> float:
    """The chance of each draft with which a step gives so many tokens on average."""
    low, high = 0.0, 1.0
    for _ in range(50):
        chance = (low + high) / 2
        if sum(chance**place for place in range(num_drafts + 1)) < num_tokens:
            low = chance
        else:
            high = chance
    return high


def _text(settings: dict[str, Any], key: str) -> str:
    value = settings.get(key)
    if value is not None and not isinstance(value, str):
        raise ConfigError(f"speculative_config: {key} must be text, not {value!r:.40}")
    return value or ""


def _whole(settings: dict[str, Any], key: str, default: Any, low: int, high: int) -> int:
    value = settings.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"speculative_config: {key} must be a whole number from {low} to {high}, not {value!r:.40}")
    return value


def _number(settings: dict[str, Any], key: str, default: float, low: float, high: float) -> float:
    value = settings.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ConfigError(f"speculative_config: {key} must be a number from {low} to {high:g}, not {value!r:.40}")
    return float(value)


def _by_batch_size(ranges: Any, num_tokens: int) -> tuple[tuple[int, int], ...]:
    """vLLM's list of (first, last, tokens): from 1 on, without overlaps; gaps and larger batches keep what was last."""
    key = "num_speculative_tokens_per_batch_size"
    if ranges is None:
        return ()
    if not isinstance(ranges, list | tuple) or not ranges or len(ranges) > 1000:
        raise ConfigError(f"speculative_config: {key} must be a list of [first, last, tokens]")
    found: list[tuple[int, int]] = []
    end = 0
    for entry in ranges:
        is_right = isinstance(entry, list | tuple) and len(entry) == 3 and all(type(part) is int for part in entry)
        if not is_right or not end < entry[0] <= entry[1] or entry[2] < 0 or (not found and entry[0] != 1):
            raise ConfigError(
                f"speculative_config: {key} must begin at 1 and go up without overlaps, not {entry!r:.60}"
            )
        found.append((entry[0], min(entry[2], num_tokens)))
        end = entry[1]
    return tuple(found)
