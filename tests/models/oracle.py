"""The truth about a model file: transformers on the same tiny random weights, in float32.

Used by the parity tests and by `report.py`, which writes docs/models.md.
"""

import importlib
from pathlib import Path

import torch
import transformers

from quire import LLM, SamplingParams, registry

TOLERANCE = 1e-4
NUM_TOKENS = 64
NUM_TOKENS_OF_HIT = 16
PROMPT_LENGTHS = (1, 5, 17, 40, 90)
# One thread: the models are too small for two.
OPTIONS = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "kv_cache_memory_bytes": 64 << 20,
    "num_threads": 1,
    "max_model_len": 192,
}
# All at once; in chunks and few at a time; two steps in flight, with the reference kernels.
ENGINES = (
    {},
    {"max_num_batched_tokens": 7, "max_num_seqs": 3},
    {"pipeline_depth": 2, "attention_backend": "reference"},
)


def make_prompt(idx: int, length: int) -> list[int]:
    return [(7 * idx + place * place) % 256 for place in range(length)]


PROMPTS = [make_prompt(idx, length) for idx, length in enumerate(PROMPT_LENGTHS)]


def all_cases() -> dict[str, dict]:
    """Every model file's TINY, and the variants that `cases/` has of it."""
    found = {}
    for name in registry.names("quire.models"):
        tiny = registry.literals("quire.models", "TINY").get(name)
        if tiny is None:
            continue
        found[name] = tiny
        if (Path(__file__).parent / "cases" / f"{name}.py").exists():
            variants = importlib.import_module(f"tests.models.cases.{name}").CASES
            found |= {f"{name}: {variant}": {**tiny, **changes} for variant, changes in variants.items()}
    return found


def oracle(fields: dict, folder: Path) -> torch.nn.Module:
    """A transformers model with random, non-degenerate weights and buffers, saved for us to load."""
    fields = dict(fields)
    architecture, model_type = fields.pop("architectures")[0], fields.pop("model_type")
    config = transformers.AutoConfig.for_model(model_type, **fields)
    torch.manual_seed(1)
    options = {"attn_implementation": "eager", "dtype": torch.float32}
    if hasattr(config, "num_experts_per_tok"):
        options["experts_implementation"] = "eager"
    model = getattr(transformers, architecture)._from_config(config, **options).eval()
    buffers = []
    for name, buffer in model.named_buffers():
        is_derived = "rotary" in name or "embed_scale" in name
        if buffer.is_floating_point() and not is_derived:
            buffers.append(buffer)
    with torch.no_grad():
        for parameter in [*model.parameters(), *buffers]:
            if parameter.ndim <= 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            else:
                parameter.copy_(torch.randn_like(parameter) * 0.15)
        model.tie_weights()
    model.save_pretrained(folder)
    return model


def logprobs(model: torch.nn.Module, tokens: list[int]) -> torch.Tensor:
    """Of the next token, after each token."""
    with torch.no_grad():
        return model(torch.tensor([tokens]), use_cache=False).logits[0].float().log_softmax(-1)


def assert_greedy(model: torch.nn.Module, prompt: list[int], answer: list[int]) -> None:
    """Each token of the answer is the oracle's likeliest after everything before it."""
    assert logprobs(model, prompt + answer)[len(prompt) - 1 : -1].argmax(-1).tolist() == answer


def largest_error(model: torch.nn.Module, folder: Path, **options: object) -> float:
    """The largest difference of a logprob, over prefill, chunked prefill, decode, a batch of mixed lengths and a prefix
    hit. Fails if a greedy token differs."""
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, prompt_logprobs=0, logprobs=0)
    again = SamplingParams(temperature=0, max_tokens=NUM_TOKENS_OF_HIT, ignore_eos=True, logprobs=0)
    worst = 0.0
    for engine in ENGINES:
        with LLM(str(folder), **{**OPTIONS, **options, **engine}) as llm:
            outputs = llm.generate(PROMPTS, params, use_tqdm=False)
            hit = llm.generate([PROMPTS[-1]], again, use_tqdm=False)[0]
        assert hit.num_cached_tokens > 0
        assert hit.outputs[0].token_ids == outputs[-1].outputs[0].token_ids[:NUM_TOKENS_OF_HIT]
        for prompt, output in zip([*PROMPTS, PROMPTS[-1]], [*outputs, hit]):
            answer = output.outputs[0].token_ids
            expected = logprobs(model, prompt + answer)
            assert expected[len(prompt) - 1 : -1].argmax(-1).tolist() == answer
            found = [*(output.prompt_logprobs or [])[1:], *output.outputs[0].logprobs]
            tokens = (prompt + answer)[-len(found) :]
            truth = expected[-len(found) - 1 : -1].gather(1, torch.tensor(tokens)[:, None])[:, 0]
            ours = torch.tensor([entry[token].logprob for entry, token in zip(found, tokens)])
            worst = max(worst, (ours - truth).abs().max().item())
    return worst
