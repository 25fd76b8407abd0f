"""What quantizations cost in quality: the mean log-probability of a text's tokens, for every way to keep weights.

    python benchmarks/quality.py model.gguf --texts english.txt code.py [--kinds gguf bf16 int4 …] [--tokens 20000]

The baseline is the GGUF file dequantized once to bfloat16 safetensors, from which the online methods start. Kinds that
end in "+x" round activations too, as products on GPUs do, with the torch twins of those kernels; "kv-" are plain
weights with a KV cache of 8 bits; "llama.cpp" is that engine on the same file. Texts are named by the first digits of
their SHA-256 in the table. Prompts are the texts in pieces of `--piece` tokens. With `--device cuda` kinds need no
"+x": products there round activations.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from quire import LLM, SamplingParams
from quire.checkpoint.find import find
from quire.checkpoint.hf_config import read_config
from quire.config import EngineConfig
from quire.frontend.model import ModelInfo
from quire.ops.packed_linear import words
from quire.ops.packed_linear.forms import Affine, Float8, Form
from quire.quant.base import Quantized
from quire.quant.kept import numbers
from quire.quant.plain.dense import Dense
from quire.worker import choose
from quire.worker.load import checkpoint_tensors

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from benchmarks.peers import install  # noqa: E402

KINDS = ("bf16", "gguf", "fp8", "int8", "int4", "mxfp4", "fp8+x", "int8+x", "kv-fp8", "kv-int8")
LLAMA_CPP = "llama.cpp"
PARAMS = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, ignore_eos=True)


class RoundedInputs(Quantized, Dense):
    """Weights as plain numbers, activations rounded as the form says."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.rounds: str | None = None

    def put_form(self, part_idx: int, form: Form) -> None:
        if isinstance(form, Affine | Float8):
            self.rounds = form.rounds
        self.put(part_idx, form.numbers().to(self.device, self.dtype))

    def apply(self, x: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None = None) -> Tensor:
        if self.rounds is not None:
            codes, scales = words.round_rows(x, self.rounds)
            x = (codes.float() * scales).to(x.dtype)
        return super().apply(x, bias, out_dtype)


METHOD = EXPERTS = RoundedInputs  # this file is a candidate of `worker/choose.py` for kinds with "+x"
why_not = numbers.why_not


def dequantized(gguf: Path, folder: Path) -> None:
    """The model of a GGUF file as a Hugging Face folder in bfloat16, without its tokenizer."""
    files = find(str(gguf))
    config = read_config(files)
    tensors = {name: tensor.read().dense(torch.bfloat16) for name, tensor in checkpoint_tensors(files, config)}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))


def mean_logprob(llm: LLM, pieces: list[list[int]]) -> float:
    total, count = 0.0, 0
    for piece in pieces:
        found = llm.generate([piece], PARAMS, use_tqdm=False)[0].prompt_logprobs
        total += sum(entry[token].logprob for entry, token in zip(found[1:], piece[1:], strict=True))
        count += len(piece) - 1
    return total / count


def by_llama_cpp(gguf: Path, pieces: dict[str, list[list[int]]]) -> dict[str, float]:
    python = install.LLAMA_CPP.environment.python(install.DEFAULT_FOLDER)
    if not python.exists():
        raise SystemExit("llama.cpp is not there: python benchmarks/peers/install.py llama.cpp")
    script = Path(install.__file__).with_name("llama_cpp_quality.py")
    found = subprocess.run([python, script, gguf], input=json.dumps(pieces), capture_output=True, text=True, check=True)
    return json.loads(found.stdout)


def measure(kind: str, device: str, gguf: Path, folder: Path, pieces: dict[str, list[list[int]]]) -> dict[str, float]:
    if kind == LLAMA_CPP:
        return by_llama_cpp(gguf, pieces)
    name, _, rounded = kind.partition("+")
    longest = max(len(piece) for some in pieces.values() for piece in some)
    options = {"device": device, "dtype": "bfloat16", "max_model_len": longest + 8, "enable_prefix_caching": False}
    if name.startswith("kv-"):
        options["kv_cache_dtype"], name = name.removeprefix("kv-"), "bf16"
    model, quantization = (gguf, "gguf") if name == "gguf" else (folder, "none" if name == "bf16" else name)
    candidates = choose.CANDIDATES["quantized linear"]["cpu"]
    choose.CANDIDATES["quantized linear"]["cpu"] = ("benchmarks.quality",) if rounded else candidates
    try:
        with LLM(str(model), quantization=quantization, skip_tokenizer_init=True, **options) as llm:
            return {text: mean_logprob(llm, some) for text, some in pieces.items()}
    finally:
        choose.CANDIDATES["quantized linear"]["cpu"] = candidates


def cut(gguf: Path, texts: list[Path], num_tokens: int, size: int) -> dict[str, list[list[int]]]:
    """Pieces of the beginning of each text, equally many tokens of all, together at least `num_tokens` that count.

    A piece's first token does not: nothing comes before it.
    """
    tokenizer = ModelInfo.open(EngineConfig.from_kwargs(model=str(gguf), device="cpu")).need_tokenizer("a text")
    per_text = -(-num_tokens // len(texts))
    length = per_text + -(-per_text // (size - 1))
    pieces = {}
    for path in texts:
        content = path.read_text()
        ids = tokenizer.encode_as_text(content)[:length]
        name = f"{path.name} {hashlib.sha256(content.encode()).hexdigest()[:12]}"
        pieces[name] = [ids[start : start + size] for start in range(0, len(ids) - 1, size)]
    return pieces


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("gguf", type=Path)
    parser.add_argument("--texts", type=Path, nargs="+", required=True)
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=(*KINDS, LLAMA_CPP))
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--piece", type=int, default=1024)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    pieces = cut(args.gguf, args.texts, args.tokens, args.piece)
    num_tokens = sum(len(piece) - 1 for some in pieces.values() for piece in some)
    print(f"{args.gguf.name}, {num_tokens:,} tokens\n\n| kept as | {' | '.join(pieces)} | seconds |")
    print("| --- |" + " --- |" * (len(pieces) + 1))
    with tempfile.TemporaryDirectory() as folder:
        dequantized(args.gguf, Path(folder))
        for kind in args.kinds:
            started = time.monotonic()
            found = measure(kind, args.device, args.gguf, Path(folder), pieces)
            columns = " | ".join(f"{value:.4f}" for value in found.values())
            print(f"| {kind} | {columns} | {time.monotonic() - started:.0f} |", flush=True)


if __name__ == "__main__":
    sys.modules["benchmarks.quality"] = sys.modules["__main__"]  # by which name it is a candidate
    main()
