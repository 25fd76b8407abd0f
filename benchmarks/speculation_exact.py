"""Checks that speculative decoding changes no token: `python benchmarks/speculation_exact.py [--prompts 64]`.

In float32, with real weights: prompts with passages to be repeated, half of them greedy, half seeded at temperature 0.8
with penalties, an eighth with a grammar; every prompt twice, so that the second finds a prefix; at pipeline depths 1
and 2; once with so few KV blocks that requests are preempted. Drafts of workers are verified however many requests run,
those of the core come with few requests at a time. A draft model is a copy of the model with noise on its weights;
predictions are the answers with every ninth token changed. With `--layers 8` the model is cut to its first layers: its
text is poor, and all of it takes minutes instead of hours. Printed are the tokens that differ from those without
speculation, and how many drafts were accepted at each place. The exit status is 1 if a token differs, or if under 20%
or over 95% of the drafts were accepted, or nobody was preempted where that was wanted: then nothing was shown.
"""

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import torch
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from benchmarks.quality import dequantized  # noqa: E402
from quire import LLM, SamplingParams  # noqa: E402
from quire.checkpoint.find import find  # noqa: E402
from quire.messages import AddRequest  # noqa: E402
from quire.params import StructuredOutputs  # noqa: E402

NUM_DRAFTS = 4
COMMON = {
    "num_speculative_tokens": NUM_DRAFTS,
    "num_speculative_tokens_per_batch_size": [[1, 1000, NUM_DRAFTS]],
}
SPECULATIONS = {
    "ngram": {"method": "ngram", "prompt_lookup_min": 2, **COMMON},
    "suffix": {"method": "suffix", "suffix_decoding_max_cached_requests": 0, **COMMON},
    "draft_model": {"method": "draft_model", **COMMON},
    "prediction": None,
}
AT_ONCE = {"suffix": 4, "prediction": 2}  # prompts; else all
FEW_BLOCKS = {"suffix": 40, "prediction": 34}  # too few for so many; else 160
NOISE = 0.15  # of a draft model's weights, times their standard deviation
CASES = {
    "depth 1": {"pipeline_depth": 1},
    "depth 2": {"pipeline_depth": 2},
    "preemption": {"pipeline_depth": 2},
}


def prompts_of(llm: LLM, num_prompts: int) -> list[list[int]]:
    """Passages of this project's own texts, to be repeated; each prompt is there twice."""
    tokenizer = llm.get_tokenizer()
    ids = tokenizer.encode((ROOT / "README.md").read_text())
    before, after = tokenizer.encode("Repeat this exactly.\n\n"), tokenizer.encode("\n\nThe same again:\n\n")
    source = random.Random(0)
    found = []
    for _ in range(num_prompts // 2):
        start = source.randrange(len(ids) - 200)
        found.append(before + ids[start : start + source.randrange(60, 160)] + after)
    return found * 2


def params_of(num_prompts: int, num_tokens: int) -> list[SamplingParams]:
    common = {"max_tokens": num_tokens, "ignore_eos": True, "logprobs": 0}
    greedy = SamplingParams(temperature=0, **common)
    penalties = {"presence_penalty": 0.1, "frequency_penalty": 0.05, "repetition_penalty": 1.02}
    seeded = [SamplingParams(temperature=0.8, seed=i, **penalties, **common) for i in range(num_prompts)]
    found = [greedy if i % 2 else seeded[i] for i in range(num_prompts)]
    for i in range(0, num_prompts, 8):
        words = StructuredOutputs(regex=r"([A-Za-z`.,\-]+[ \n]){40,2000}")
        found[i] = msgspec.structs.replace(found[i], structured_outputs=words)
    return found


def cut(model: str, num_layers: int, folder: Path) -> None:
    """A copy of the model, a GGUF file or a folder, with its first layers only; 0: all."""
    files = find(model)
    if files.kind == "hf":
        shutil.copytree(files.path, folder, dirs_exist_ok=True)
    else:
        dequantized(files.path, folder)
    if not num_layers:
        return
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": num_layers}))
    tensors = load_file(folder / "model.safetensors")
    layer_of = {name: int(name.split(".")[2]) for name in tensors if name.startswith("model.layers.")}
    kept = {name: values for name, values in tensors.items() if layer_of.get(name, 0) < num_layers}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})


def perturbed(model: str, num_layers: int, folder: Path) -> None:
    """A copy of the model that mostly agrees with it."""
    cut(model, num_layers, folder)
    tensors = load_file(folder / "model.safetensors")
    torch.manual_seed(0)
    for name, values in tensors.items():
        if values.ndim == 2 and "embed" not in name:
            noise = torch.randn_like(values, dtype=torch.float32) * values.float().std() * NOISE
            tensors[name] = (values.float() + noise).to(values.dtype)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def predict(llm: LLM, answers: list[list[int]]) -> None:
    """Requests come with these answers, every ninth token of which is changed."""
    send = llm.client.send
    predictions = iter([[token + (i % 9 == 5) for i, token in enumerate(answer)] for answer in answers])

    def send_predicted(message: object) -> None:
        if isinstance(message, AddRequest):
            message = msgspec.structs.replace(message, prediction=next(predictions))
        send(message)

    llm.client.send = send_predicted


def run(args: argparse.Namespace, at_once: int = 1000, predictions: list[list[int]] | None = None, **options):
    """(token ids of every request, logprobs of these, the engine's counts)."""
    common = {"dtype": "float32", "quantization": "none", "max_num_seqs": args.seqs, "max_model_len": 512}
    with LLM(args.folder, **common, tokenizer=str(find(args.model).path), device=args.device, **options) as llm:
        prompts = prompts_of(llm, args.prompts)
        params = params_of(len(prompts), args.tokens)
        if predictions is not None:
            predict(llm, predictions)
        outputs = []
        for start in range(0, len(prompts), at_once):
            some = slice(start, start + at_once)
            outputs += [output.outputs[0] for output in llm.generate(prompts[some], params[some], use_tqdm=False)]
        stats = llm.client.engine.stats()
    tokens = [list(output.token_ids) for output in outputs]
    logprobs = [[entry[token].logprob for entry, token in zip(o.logprobs, o.token_ids)] for o in outputs]
    return tokens, logprobs, stats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--layers", type=int, default=0, help="of the model; 0: all")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--seqs", type=int, default=16, help="requests that run at once")
    parser.add_argument("--methods", nargs="+", default=list(SPECULATIONS), choices=SPECULATIONS)
    args = parser.parse_args()
    started = time.monotonic()
    target, folder = tempfile.TemporaryDirectory(), tempfile.TemporaryDirectory()
    cut(args.model, args.layers, Path(target.name))
    args.folder = target.name
    expected, expected_logprobs, _ = run(args)
    print(f"without: {time.monotonic() - started:.0f} s", flush=True)
    is_right = True
    if "draft_model" in args.methods:
        perturbed(args.model, args.layers, Path(folder.name))
        SPECULATIONS["draft_model"]["model"] = folder.name
    for method in args.methods:
        for case, options in CASES.items():
            started = time.monotonic()
            predictions = expected if method == "prediction" else None
            settings = {"speculative_config": SPECULATIONS[method], **options}
            if case == "preemption":
                settings["num_gpu_blocks_override"] = FEW_BLOCKS.get(method, 160)
            found, logprobs, stats = run(args, AT_ONCE.get(method, 1000), predictions, **settings)
            pairs = zip(expected, found)
            differing = sum(a != b for theirs, ours in pairs for a, b in zip(theirs, ours, strict=True))
            largest = max(abs(a - b) for x, y in zip(expected_logprobs, logprobs) for a, b in zip(x, y))
            accepted = sum(stats.accepted_drafts)
            share = accepted / max(1, stats.num_draft_tokens)
            print(
                f"{method}, {case}: {differing} of {sum(map(len, expected)):,} tokens differ, "
                f"logprobs by {largest:.1e}; {share:.0%} of {stats.num_draft_tokens:,} drafts accepted, "
                f"by place {stats.accepted_drafts} of {stats.num_drafts:,}; {stats.num_preemptions} preemptions, "
                f"{time.monotonic() - started:.0f} s",
                flush=True,
            )
            is_right &= not differing and 0.2 <= share <= 0.95
            is_right &= case != "preemption" or stats.num_preemptions > 0
    folder.cleanup()
    sys.exit(not is_right)


if __name__ == "__main__":
    main()
