"""What a file of quant/ can do: keep a weight in any number of tensors, for the paths it chooses, in every layer."""

import json
import re
from pathlib import Path
from typing import get_args

import pytest
import torch
from safetensors.torch import load_file, save_file

import quire.quant
from quire import LLM, SamplingParams, registry
from quire.checkpoint.gguf import BLOCK
from quire.config import quantization_file
from quire.config.engine import Quantization
from quire.errors import BadModelFileError
from quire.layers.base import Layer
from quire.layers.weights import plain as plain_tensor
from quire.models import deepseek_v3, mixtral, qwen3_moe
from quire.ops.cpu.tape import Recording
from quire.ops.elementwise.reference import silu_mul
from quire.quant.base import Choice, Joined, Part, RawTensor, Use
from quire.quant.gguf import quantization
from quire.quant.kept import triton
from quire.quant.kept.numbers import Numbers
from quire.quant.kept.packed import PackedForms
from quire.quant.kept.triton import Words
from quire.quant.plain import packed
from quire.quant.plain.dense import Dense
from quire.worker.build import empty
from quire.worker.load import declared_weights
from tests.attached import attached
from tests.models.oracle import OPTIONS, PROMPTS
from tests.quant.methods.toy import ENDS, GROUP, numbers

BIASED = {**qwen3_moe.TINY, "attention_bias": True}
# A config, and which weights its checkpoint holds in three tensors each, by the checkpoint's own names.
CASES = {
    "a linear": (BIASED, r"model\.layers\.\d\.self_attn\.o_proj"),
    "one part of a fused linear": (BIASED, r"model\.layers\.\d\.self_attn\.k_proj"),
    "a gate without its up": (BIASED, r"model\.layers\.1\.mlp\.gate_proj"),
    "an expert": (BIASED, r"model\.layers\.[02]\.mlp\.experts\.3\..*"),
    "the head": (BIASED, "lm_head"),
    "the embedding": (BIASED, r"model\.embed_tokens"),
    "an embedding that the head is tied to": ({**BIASED, "tie_word_embeddings": True}, r"model\.embed_tokens"),
    "experts by a family's names": (mixtral.TINY, r".*\.block_sparse_moe\.experts\.\d\.w[13]"),
    "an up-projection and one of two down-projections": (deepseek_v3.TINY, r".*\.(kv_b_proj|q_a_proj)"),
    "everything": (BIASED, ".*"),
}


@pytest.fixture(autouse=True)
def with_toy(monkeypatch):
    monkeypatch.setattr(quire.quant, "__path__", [*quire.quant.__path__, str(Path(__file__).parent / "methods")])


def save(folder: Path, config: dict, tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def checkpoints(fields: dict, paths: str, folder: Path) -> tuple[Path, Path]:
    """The same numbers twice: all plain, and those of `paths` in three tensors each."""
    model = attached(empty(fields, "float32"))
    generator = torch.Generator().manual_seed(0)
    plain: dict[str, torch.Tensor] = {}
    toy: dict[str, torch.Tensor] = {}
    for ours, (weight, *_) in declared_weights(model).items():
        path = model.checkpoint_path(ours.removesuffix(".weight"))
        name = f"{path}.weight" if ours.endswith(".weight") else path
        is_matrix = len(weight.shape) == 2 and not path.endswith(".gate")
        if not is_matrix or not re.fullmatch(paths, path):
            plain[name] = toy[name] = torch.randn(weight.shape, generator=generator) * 0.15 + (len(weight.shape) == 1)
            continue
        grouped = weight.shape[0], weight.shape[1] // GROUP
        codes = torch.randint(0, 256, weight.shape, dtype=torch.uint8, generator=generator)
        # Powers of two and whole numbers: everything is exact in bfloat16.
        scales = 2.0 ** -torch.randint(9, 11, grouped, generator=generator)
        offsets = torch.randint(120, 136, grouped, generator=generator).float()
        plain[name] = numbers(codes, scales, offsets)
        toy |= {f"{path}{end}": tensor for end, tensor in zip(ENDS, (codes, scales, offsets))}
    assert toy.keys() - plain.keys()
    quantized = fields | {"quantization_config": {"quant_method": "toy", "paths": paths}}
    return save(folder / "plain", fields, plain), save(folder / "toy", quantized, toy)


def logprobs(folder: Path, **options) -> tuple[torch.Tensor, set[str], int]:
    """Logprobs of a prompt's tokens; the methods that were used; the bytes of all weights."""
    with LLM(str(folder), **{**OPTIONS, "device": "cpu", **options}) as llm:
        worker = llm.client.engine.executor.worker
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, ignore_eos=True)
        found = llm.generate([PROMPTS[3]], params, use_tqdm=False)[0].prompt_logprobs
        layers = [module for module in worker.model.modules() if isinstance(module, Layer)]
        kinds = {type(vars(layer).get("method")).__name__ for layer in layers}
        size = worker.weight_bytes
    return torch.tensor([entry[token].logprob for entry, token in zip(found[1:], PROMPTS[3][1:])]), kinds, size


@pytest.mark.parametrize("case", CASES)
def test_three_tensors_of_a_weight_give_what_its_numbers_give(case, tmp_path):
    plain, toy = checkpoints(*CASES[case], tmp_path)
    expected, kinds, _ = logprobs(plain)
    assert "Toy" not in kinds and Joined.__name__ not in kinds
    found, kinds, _ = logprobs(toy)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)
    used = {"one part of a fused linear": "Joined", "a gate without its up": "Joined", "the head": "Toy"}
    assert used.get(case) in {None, *kinds}


def test_methods_for_one_layer_may_differ_in_packed_weights_too(tmp_path, monkeypatch):
    # Where the kernels cannot be compiled, their twins in torch are used.
    monkeypatch.setattr(packed, "why_not", lambda device, dtype: None)
    plain, toy = checkpoints(BIASED, r".*\.(k_proj|gate_proj|o_proj)|lm_head", tmp_path)
    expected, kinds, _ = logprobs(plain, dtype="bfloat16")
    assert "Packed" in kinds
    found, kinds, _ = logprobs(toy, dtype="bfloat16")
    assert {"Packed", "Toy", "Joined"} <= kinds
    torch.testing.assert_close(found, expected, rtol=0, atol=0.1)


def test_tied_weights_share_their_memory(tmp_path):
    """Plain ones do, whatever their two layers do with them."""

    def weight_bytes(is_tied: bool) -> int:
        config = {**BIASED, "tie_word_embeddings": is_tied}
        plain, _ = checkpoints(config, ".*q_proj", tmp_path / str(is_tied))
        return logprobs(plain)[2]

    embedding_bytes = 4 * BIASED["vocab_size"] * BIASED["hidden_size"]
    assert weight_bytes(is_tied=False) - weight_bytes(is_tied=True) == embedding_bytes


def test_blocks_of_a_gguf_file_stay_as_they_are_beside_plain_parts():
    """A fused layer of which a file holds only some parts in blocks computes what plain weights would."""
    generator = torch.Generator().manual_seed(0)
    cpu = torch.device("cpu")
    blocks = torch.randint(0, 256, (32 * 64 // 32, 34), dtype=torch.uint8, generator=generator)
    blocks[:, :2] = torch.tensor([0.001], dtype=torch.float16).view(torch.uint8)
    tensors = (
        RawTensor("Q8_0", blocks.flatten(), (32, 64)),
        plain_tensor(torch.randn(32, 64, generator=generator).bfloat16()).read(),
    )
    parts = [Part(f"layer.{name}", (32, 64)) for name in ("gate", "up")]
    find = quantization({})
    kept = find("any", Choice(Use.PRODUCT, packed.METHOD, PackedForms))(parts, torch.bfloat16, cpu)
    dense = Dense(parts, torch.bfloat16, cpu)
    for method in (kept, dense):
        for weight, tensor in zip(method.weights(), tensors, strict=True):
            weight.load(tensor)
    x = torch.randn(3, 64, generator=generator).bfloat16()
    bias = torch.randn(64, generator=generator).bfloat16()
    torch.testing.assert_close(kept.numbers(), dense.numbers())
    torch.testing.assert_close(kept.apply(x, bias), dense.apply(x, bias), rtol=0.02, atol=0.02)
    with Recording() as recording:
        kept.apply(x, bias)
    assert not recording.computed or not packed.linear.supported()  # a step can be recorded
    gated = kept.apply_silu_mul(x, None, silu_mul)
    torch.testing.assert_close(gated, dense.apply_silu_mul(x, None, silu_mul), rtol=0.05, atol=0.05)
    assert sum(held.nbytes for held in kept.tensors()) < sum(held.nbytes for held in dense.tensors())
    assert find("any", Choice(Use.ROWS, Dense, Numbers, is_gpu=True)) is Dense


@pytest.mark.parametrize(("type_name", "place", "value"), [("Q8_0", 1, 0x7C), ("Q6_K", 209, 0x7E), ("MXFP4", 0, 255)])
def test_a_scale_of_a_gguf_file_that_is_no_number_is_refused(type_name, place, value):
    raw = torch.zeros(16 * 256 // BLOCK[type_name][0], BLOCK[type_name][1], dtype=torch.uint8)
    raw[3, place] = value
    make = quantization({})("any", Choice(Use.PRODUCT, packed.METHOD, PackedForms))
    method = make([Part("layer.up", (16, 256))], torch.bfloat16, torch.device("cpu"))
    with pytest.raises(BadModelFileError, match="a scale of layer.up is not a finite number"):
        next(method.weights()).load(RawTensor(type_name, raw.flatten(), (16, 256)))


@pytest.mark.parametrize("type_name", ["Q4_K", "Q6_K", "IQ4_XS", "MXFP4", "Q2_K", "F16"])
def test_blocks_of_a_gguf_file_stay_packed_for_gpus(type_name, monkeypatch):
    """Beside a plain part: in Triton's interpreter, if there is no GPU."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    n, k = 16, 256
    elements, num_bytes = BLOCK[type_name]
    raw = torch.full((n * k // elements, num_bytes), 0x2F, dtype=torch.uint8)  # scales of about 0.11, as float16
    if type_name == "MXFP4":
        raw[:, 0] = 124
    if type_name != "F16":
        raw[:, num_bytes // 2] = torch.arange(len(raw)).to(torch.uint8)  # some codes
    if type_name == "Q2_K":  # not all of the weight at once
        monkeypatch.setattr(triton, "GPU_VALUES_AT_ONCE", 5 * k)
    if type_name == "MXFP4":  # of scales this large a part goes to its output
        monkeypatch.setattr(triton, "GPU_VALUES_AT_ONCE", 4 * k)
        raw[-1, 0] = 140
    tensors = RawTensor(type_name, raw.flatten(), (n, k)), plain_tensor(torch.randn(n, k).bfloat16()).read()
    parts = [Part(f"layer.{name}", (n, k)) for name in ("gate", "up")]
    kept = quantization({})("any", Choice(Use.PRODUCT, Dense, Words, is_gpu=True))(parts, torch.float32, device)
    dense = Dense(parts, torch.float32, device)
    for method in (kept, dense):
        for weight, tensor in zip(method.weights(), tensors, strict=True):
            weight.load(tensor)
    torch.testing.assert_close(kept.numbers(), dense.numbers())
    for num_rows in (1, 6):
        x = torch.randn(num_rows, k, device=device)
        torch.testing.assert_close(kept.apply(x, None), dense.apply(x, None), rtol=1e-4, atol=1e-3)


def test_a_tensor_of_a_weight_that_is_missing_is_named(tmp_path):
    _, toy = checkpoints(BIASED, r".*\.o_proj", tmp_path)
    tensors = load_file(toy / "model.safetensors")
    del tensors["model.layers.1.self_attn.o_proj.offsets"]
    save_file(tensors, toy / "model.safetensors", {"format": "pt"})
    with pytest.raises(BadModelFileError, match=r"lacks model\.layers\.1\.self_attn\.o_proj\.offsets"):
        logprobs(toy)


def test_files_of_the_folder_are_the_quantizations_there_are():
    files = set(registry.names("quire.quant")) - {"toy"}
    assert {quantization_file(name) for name in get_args(Quantization)} == {"auto", *files}
