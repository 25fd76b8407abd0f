"""What a rank takes out of a checkpoint's files: every byte of its part once, and no other."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from quire import registry
from quire.checkpoint.find import find
from quire.checkpoint.hf_config import read_config
from quire.config import EngineConfig
from quire.config.resolve import Machine, resolve
from quire.distributed.base import Group, Ranks
from quire.errors import QuireError, UnsupportedModelError
from quire.layers.weights import pick, plain, transposed
from quire.models import falcon, gpt2, gpt_neox, gpt_oss, llama
from quire.quant.base import Weight
from quire.worker.build import build, empty, stage_layers
from quire.worker.dummy import dummy_tensors
from quire.worker.load import checkpoint_tensors, declared_weights, translated
from quire.worker.worker import Worker
from tests.models.oracle import oracle
from tests.models.test_mxfp4 import pack_experts
from tests.quant.published.common import SIZES
from tests.quant.test_dummy import FORMS, loaded

TINY = registry.literals("quire.models", "TINY")
LAYOUTS = {
    "tp 2": {"tensor_parallel_size": 2},
    "tp 3": {"tensor_parallel_size": 3},
    "pp 2": {"pipeline_parallel_size": 2},
    "tp 2, whole experts": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
}
# Some ranks share a KV head; in files where it follows its queries, a rank's rows have others between them.
VARIANTS = {
    "falcon, one KV head": {
        **falcon.TINY,
        "new_decoder_architecture": False,
        "multi_query": True,
        "num_kv_heads": 1,
    },
    "llama, one KV head": {**llama.TINY, "num_key_value_heads": 1},
}
NEOX = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8, "num_attention_heads": 16}
GPT2 = {"n_embd": 1024, "n_inner": 4096, "n_layer": 8, "n_head": 16}
# Inputs cannot be divided if their groups are not neighbours, or if rows follow each other in blocks.
UNDIVIDED = {
    "gptq, 8 bits in an order",
    "compressed, packed with zero points, in an order",
    "bitsandbytes nf4",
    "bitsandbytes fp4, nested",
}


class Reads(TorchDispatchMode):
    """Counts how often operations take each byte of the files in a folder, or of one.

    It goes by the addresses of their inputs, and so knows nothing of the code that it watches.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.files: list[tuple[int, torch.Tensor]] = []  # address of each, and how often each byte was taken

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if not self.files and any(tensor.dtype is torch.uint8 for tensor in inputs):
            maps = re.findall(rf"(\w+)-(\w+) .*{self.path}.*", Path("/proc/self/maps").read_text())
            bounds = [(int(start, 16), int(end, 16)) for start, end in maps]
            self.files = [(start, torch.zeros(end - start, dtype=torch.uint8)) for start, end in bounds]
        results = out if isinstance(out, (list, tuple)) else [out]
        own = {result.untyped_storage().data_ptr() for result in results if isinstance(result, torch.Tensor)}
        for tensor in inputs:
            if tensor.untyped_storage().data_ptr() not in own:  # not just viewed
                self._take(tensor, args[1:3] if func is torch.ops.aten.index_select.default else None)
        return out

    def _take(self, tensor: torch.Tensor, picked: tuple[int, torch.Tensor] | None) -> None:
        for address, counts in self.files:
            start = tensor.data_ptr() - address
            if 0 <= start < len(counts):
                size = tensor.element_size()
                shape = [length if stride else 1 for length, stride in zip(tensor.shape, tensor.stride())]
                strides = [stride * size for stride in tensor.stride()]
                taken = counts.as_strided((*shape, size), (*strides, 1), start)
                if picked is None:
                    taken += 1
                else:
                    taken.index_add_(*picked, torch.ones_like(taken.index_select(*picked)))

    @property
    def counts(self) -> torch.Tensor:
        return torch.cat([counts for _, counts in self.files])


def places(options: dict) -> Iterator[Ranks]:
    num_stages = options.get("pipeline_parallel_size", 1)
    for stage in range(num_stages):
        for rank in range(options.get("tensor_parallel_size", 1)):
            group = Group()
            group.rank, group.size = rank, options.get("tensor_parallel_size", 1)
            yield Ranks(group, stage, num_stages)


def declared(config: EngineConfig, ranks: Ranks) -> dict[str, Weight]:
    """What a rank would load, by name."""
    model = build(config, read_config(find(config.model.model)), ranks=ranks)
    model.take_stage(*stage_layers(model, ranks.num_stages)[ranks.stage])
    return {name: weight for name, (weight, *_) in declared_weights(model).items()}


class Stored(NamedTuple):
    shape: tuple[int, ...]
    num_bytes: int


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """What a checkpoint holds, by the names of the model."""
    files = find(str(folder))
    config = read_config(files)
    tensors = checkpoint_tensors(files, config)
    if files.kind == "hf":
        tensors = translated(empty(config, "float32"), tensors)
    return {name: Stored(tensor.shape, tensor.num_bytes) for name, tensor in tensors}


def check(folder: Path, layout: str, slack: float = 0.0, **options: object) -> None:
    """Every rank takes what it declares; all together everything, and twice only what several declare.

    `slack`: the share of bytes that others than torch's operations take.
    """
    asked = EngineConfig.from_kwargs(device="cpu", max_model_len=192, num_threads=1, **LAYOUTS[layout], **options)
    files = find(str(folder))
    config = resolve(asked, str(folder), files.kind, read_config(files), Machine(num_cores=1))
    stored = stored_tensors(folder)
    taken, total = torch.zeros(1), 0
    for ranks in places(LAYOUTS[layout]):
        own = {name: weight for name, weight in declared(config, ranks).items() if name in stored}
        num_bytes = sum(declared_bytes(weight, stored[name], ranks.group) for name, weight in own.items())
        with Reads(folder) as reads:
            assert Worker(config, ranks).bytes_read == num_bytes
        assert (reads.counts > 0).sum() <= 1.02 * num_bytes, ranks
        assert slack or reads.counts.sum() <= 1.02 * num_bytes, ranks
        taken = taken + (reads.counts > 0)
        total += num_bytes
    whole = sum(tensor.num_bytes for tensor in stored.values())
    assert (1 - slack) * whole <= (taken > 0).sum() <= whole
    assert (1 - slack) * total <= taken.sum() <= total


def declared_bytes(weight: Weight, tensor: Stored, group: Group) -> int:
    counts = torch.zeros(tensor.shape, dtype=torch.bool)
    for piece in weight.pieces(group.rank, group.size):
        counts[piece] = True
    return tensor.num_bytes * int(counts.sum()) // counts.numel()


@pytest.mark.parametrize("name", [*TINY, *VARIANTS])
def test_each_rank_takes_its_part_of_the_files_and_nothing_else(name, tmp_path):
    fields = {**TINY, **VARIANTS}[name]
    oracle(fields, tmp_path)
    has_experts = any("experts" in key for key in fields)
    for layout in LAYOUTS:
        if "experts" in layout and not has_experts:
            continue
        try:
            check(tmp_path, layout, dtype="float32")
        except UnsupportedModelError as error:
            assert layout == "tp 3" and "--tensor-parallel-size 3 is too many for this model" in str(error)


@pytest.mark.parametrize("layout", ["tp 2", "pp 2", "tp 2, whole experts"])
def test_experts_in_mxfp4_are_divided_too(layout, tmp_path):
    oracle({**gpt_oss.TINY, "intermediate_size": 128}, tmp_path)
    pack_experts(tmp_path)
    check(tmp_path, layout, slack=0.01, dtype="float32")


def write_gguf(path: Path, type_name: str) -> None:
    """A tiny Llama, whose queries and keys such files hold in another order."""
    writer = gguf.GGUFWriter(path, "llama")
    sizes = {"context_length": 256, "embedding_length": 64, "feed_forward_length": 128, "block_count": 2}
    heads = {"attention.head_count": 4, "attention.head_count_kv": 2, "rope.dimension_count": 16}
    for key, value in {**sizes, **heads, "vocab_size": 256}.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-6)
    shapes = {"attn_norm": (64,), "attn_q": (64, 64), "attn_k": (32, 64), "attn_v": (32, 64), "attn_output": (64, 64)}
    shapes |= {"ffn_norm": (64,), "ffn_gate": (128, 64), "ffn_up": (128, 64), "ffn_down": (64, 128)}
    names = {f"blk.{idx}.{name}": shape for idx in range(2) for name, shape in shapes.items()}
    names |= {"token_embd": (256, 64), "output_norm": (64,), "output": (256, 64)}
    for name, shape in names.items():
        kind = gguf.GGMLQuantizationType[type_name if len(shape) == 2 else "F32"]
        values = np.random.default_rng(0).standard_normal(shape, np.float32)
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("layout", ["tp 2", "pp 2"])
@pytest.mark.parametrize("type_name", ["Q8_0", "Q4_1", "F16"])
def test_blocks_of_a_gguf_file_are_divided_too(type_name, layout, tmp_path):
    write_gguf(tmp_path / "tiny.gguf", type_name)
    check(tmp_path / "tiny.gguf", layout, slack=0.01, dtype="float32")


def write_dummies(folder: Path, fields: dict) -> None:
    """A checkpoint with random codes and scales, as safetensors."""
    (folder / "config.json").write_text(json.dumps(fields))
    model, *_ = loaded(str(folder))
    header, data = {}, []
    for name, tensor in dummy_tensors(model, 0, torch.device("cpu")):
        raw = tensor.read()
        start = sum(map(len, data))
        data.append(raw.raw.numpy().tobytes())
        header[name] = {"dtype": raw.type_name, "shape": raw.shape, "data_offsets": (start, start + len(data[-1]))}
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(b"".join((len(text).to_bytes(8, "little"), text, *data)))


@pytest.mark.parametrize("name", FORMS)
def test_codes_and_scales_are_divided_too(name, tmp_path):
    sizes = {**SIZES, "intermediate_size": 512, "head_dim": 128}
    write_dummies(tmp_path, {**sizes, "quantization_config": FORMS[name][0]})
    if name in UNDIVIDED:
        with pytest.raises(QuireError):
            check(tmp_path, "tp 2", slack=0.01, dtype="float32")
    else:
        check(tmp_path, "tp 2", slack=0.01, dtype="float32")


def test_a_scalar_is_whole_on_every_rank():
    scale = plain(torch.tensor(0.5))
    assert scale.cut([()]).read().shape == ()


def test_a_gpu_gets_the_files_order_and_makes_the_models():
    """What is uploaded lies in one piece; transposed and reordered it is the same tensor as without."""
    values = torch.arange(6 * 8, dtype=torch.float32).view(6, 8)
    changed = pick(transposed(plain(values)), [*range(0, 8, 2), *range(1, 8, 2)])
    tensors = [changed, changed.cut([(slice(2, 4),)]), changed.cut([(slice(None), slice(1, 3))])]
    sent = []
    for tensor in tensors:
        uploaded = tensor.uploaded(lambda raw: sent.append(raw) or raw.clone())
        assert torch.equal(uploaded.read().values(), tensor.read().values())
    assert [raw.numel() for raw in sent] == [tensor.num_bytes for tensor in tensors]
    assert sent[-1].view(torch.float32).tolist() == values[1:3].flatten().tolist()
    assert torch.equal(changed.read().values(), torch.cat((values.T[::2], values.T[1::2])))


@pytest.mark.parametrize("family, sizes", [(gpt_neox, NEOX), (gpt2, GPT2)], ids=["rows in another order", "transposed"])
def test_a_rank_takes_little_more_memory_than_its_part(family, sizes, tmp_path):
    """Of some 200 MB one of two ranks loads half."""
    fields = {**family.TINY, **sizes}
    (tmp_path / "config.json").write_text(json.dumps({**fields, "dtype": "bfloat16"}))
    architecture, model_type = fields.pop("architectures")[0], fields.pop("model_type")
    with torch.device("meta"):
        model = getattr(transformers, architecture)(transformers.AutoConfig.for_model(model_type, **fields))
    tensors = {name: torch.zeros(value.shape, dtype=torch.bfloat16) for name, value in model.named_parameters()}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    command = [sys.executable, "benchmarks/load_memory.py", str(tmp_path), "--one", "none", "-tp", "2", "--rank", "1"]
    run = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True)
    size, _, ratio, _ = run.stdout.strip(" |\n").split("|")[2:]
    assert 90 < int(size) < 140 and float(ratio) <= 1.15, run.stdout
