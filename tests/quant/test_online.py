"""`--quantization fp8`, `int8`, `int4` and `mxfp4`: a plain checkpoint's weights, rounded while they are loaded."""

import importlib

import pytest
import torch

from quire import LLM, SamplingParams
from quire.errors import ConfigError
from quire.models import gpt_oss, llama, mixtral
from quire.ops.packed_linear import cpu as linear
from quire.quant import _select
from quire.quant.base import Part, Quantized
from quire.quant.plain.packed import Packed
from quire.worker import choose
from tests.models import oracle as models
from tests.models.oracle import PROMPTS, oracle
from tests.quant.published.common import SIZES
from tests.quant.test_published import methods, numbers_by_path

OPTIONS = {**models.OPTIONS, "device": "cpu"}
# The largest difference of a weight from its original, over the largest weight of its group.
STEPS = {"fp8": 2**-4, "int8": 0.5 / 127, "int4": 1 / 15, "mxfp4": 0.25}
NUMBERS = {"fp8": 256, "int8": 256, "int4": 16, "mxfp4": 16}
PARAMS = SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=0, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("plain")
    oracle(SIZES, path)
    return path


def run(llm: LLM) -> tuple[list[int], torch.Tensor]:
    output = llm.generate([PROMPTS[3]], PARAMS, use_tqdm=False)[0]
    pairs = zip(output.prompt_logprobs[1:], PROMPTS[3][1:])
    return output.outputs[0].token_ids, torch.tensor([entry[token].logprob for entry, token in pairs])


@pytest.fixture(scope="module")
def plain(folder):
    with LLM(str(folder), **OPTIONS) as llm:
        return numbers_by_path(llm), run(llm)[1]


@pytest.mark.parametrize("name", STEPS)
def test_weights_of_products_are_rounded_and_no_others(name, folder, plain):
    weights, logprobs = plain
    with LLM(str(folder), quantization=name, **OPTIONS) as llm:
        found = numbers_by_path(llm)
        rounded = {part.path for kept in methods(_model(llm)) if isinstance(kept, Quantized) for part in kept.parts}
        _, found_logprobs = run(llm)
    # On CPUs, whole numbers are also used for the head, and for an embedding that it is tied to.
    has_head = name in ("int8", "int4")
    assert rounded == {path for path in weights if "_proj" in path or (has_head and path == "lm_head")}
    for path, expected in weights.items():
        if path not in rounded:
            assert torch.equal(found[path], expected)
            continue
        assert not torch.equal(found[path], expected)
        groups, originals = (values.unflatten(1, (-1, 32)) for values in (found[path], expected))
        error = (groups - originals).abs().amax(2)
        by = originals.abs().amax(2) if name in ("int4", "mxfp4") else originals.abs().amax((1, 2))[:, None]
        assert (error <= STEPS[name] * by * 1.01).all()
        assert max(len(row.unique()) for row in groups[:, 0]) <= NUMBERS[name]
    assert found_logprobs.isfinite().all() and not torch.equal(found_logprobs, logprobs)


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="takes minutes in the interpreter: tests/ops checks its kernels"
)
@pytest.mark.parametrize("kind", ["linear", "experts", "biased experts"])
@pytest.mark.parametrize("name", STEPS)
def test_kernels_of_gpus_give_what_the_rounded_numbers_give(name, kind, tmp_path, monkeypatch):
    oracle(ALL[kind], tmp_path)
    options = {**OPTIONS, "device": "cuda"}
    with LLM(str(tmp_path), quantization=name, **options) as llm:
        tokens, logprobs = run(llm)
    monkeypatch.setitem(choose.CANDIDATES["quantized linear"], "gpu", ("quire.quant.kept.numbers",))
    with LLM(str(tmp_path), quantization=name, **options) as llm:
        expected_tokens, expected = run(llm)
    assert tokens == expected_tokens
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=2e-4)


def _model(llm: LLM) -> torch.nn.Module:
    return llm.client.engine.executor.worker.model


@pytest.mark.parametrize("tied", [False, True])
def test_a_tied_embedding_is_the_heads_weight(tied, tmp_path):
    oracle({**SIZES, "tie_word_embeddings": tied}, tmp_path)
    with LLM(str(tmp_path), quantization="int8", **OPTIONS) as llm:
        model = _model(llm)
        embedding, head = model.model.embed_tokens.method, model.lm_head.method
        assert (embedding is head) == tied == isinstance(embedding, Quantized)
        ids = torch.tensor([3, 0, 7], dtype=torch.int32)
        assert torch.equal(embedding.rows(ids, model.kernels.embedding), embedding.numbers()[ids.long()])


ALL = {  # every token goes to all experts: which are chosen depends on the last bits
    "linear": llama.TINY,
    "experts": {**mixtral.TINY, "num_experts_per_tok": mixtral.TINY["num_local_experts"]},
    "biased experts": {**gpt_oss.TINY, "num_experts_per_tok": gpt_oss.TINY["num_local_experts"]},
}


@pytest.mark.parametrize("config", ALL.values(), ids=ALL)
@pytest.mark.parametrize("name", STEPS)
def test_packed_weights_give_what_their_numbers_give(name, config, tmp_path, monkeypatch):
    """In bfloat16, with the compiled kernels of CPUs, against products with plain numbers."""
    oracle({**config, "tie_word_embeddings": True}, tmp_path)
    options = {**OPTIONS, "dtype": "bfloat16"}
    with LLM(str(tmp_path), quantization=name, **options) as llm:
        _, packed = run(llm)
        if linear.supported():
            assert all(isinstance(kept, Packed) for kept in methods(_model(llm)) if isinstance(kept, Quantized))
    monkeypatch.setattr(linear, "supported", lambda: False)  # nothing is packed then
    with LLM(str(tmp_path), quantization=name, **options) as llm:
        _, plain = run(llm)
        assert not any(isinstance(kept, Packed) for kept in methods(_model(llm)))
    torch.testing.assert_close(packed, plain, rtol=0, atol=0.15)


@pytest.mark.parametrize("name", STEPS)
def test_a_weight_rounded_some_rows_at_a_time_is_the_same(name, monkeypatch):
    online = importlib.import_module(f"quire.quant.{name}").Online()
    weight, part = torch.randn(50, 64), Part("layer", (50, 64), end=".weight")
    whole = online.read(part, {".weight": weight})
    monkeypatch.setattr(_select, "CPU_VALUES_AT_ONCE", 7 * 64)
    parts = online.read(part, {".weight": weight})
    for field, value in vars(whole).items():
        found = getattr(parts, field)
        assert torch.equal(found, value) if isinstance(value, torch.Tensor) else found == value


def test_what_cannot_be_done_is_refused(folder):
    with pytest.raises(ConfigError, match="needs a checkpoint quantized like that"):
        LLM(str(folder), quantization="awq", **OPTIONS)
