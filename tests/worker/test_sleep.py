"""Sleeping engines give the device's memory back, and go on as if nothing had been."""

import gc
import weakref

import pytest
import torch

from quire import LLM, SamplingParams
from quire.errors import RequestError
from quire.worker.host_copies import HostCopies
from quire.worker.kv_cache import cache_layers
from tests.worker.test_gpu import DEVICE, HAS_GPU, OPTIONS, PROMPTS, model

__all__ = ["model"]

PARAMS = SamplingParams(temperature=0.8, seed=1, max_tokens=12, ignore_eos=True)


def tokens(llm):
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("draft", [False, True], ids=["", "draft model"])
@pytest.mark.parametrize("device", [{"device": "cpu"}, DEVICE] if HAS_GPU else [{"device": "cpu"}], ids=str)
def test_the_same_tokens_come_after_a_sleep(model, device, draft, level):
    options = {**OPTIONS, **device}
    if draft:
        options["speculative_config"] = {"method": "draft_model", "model": str(model)}
    with LLM(str(model), **options) as llm:
        expected = tokens(llm)
        worker = llm.client.engine.executor.worker
        cache = weakref.ref(worker.runner.memory)
        for _ in range(2):
            llm.sleep(level)
            gc.collect()
            assert cache() is None
            with pytest.raises(RequestError, match="asleep: call wake_up"):
                tokens(llm)
            llm.sleep(level)
            llm.wake_up()
            assert tokens(llm) == expected
            llm.client.engine.kv.check()
        llm.wake_up()
        assert tokens(llm) == expected


def test_kernels_of_gpus_wake_up_too(model):
    with LLM(str(model), **OPTIONS, **DEVICE) as llm:
        expected = llm.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=3), use_tqdm=False)
        llm.sleep()
        llm.wake_up()
        found = llm.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=3), use_tqdm=False)
    assert found[0].outputs[0].token_ids == expected[0].outputs[0].token_ids


def test_no_layer_holds_the_memory_of_a_runner_that_was_closed(model):
    with LLM(str(model), **OPTIONS, device="cpu") as llm:
        worker = llm.client.engine.executor.worker
        storages = [plane.untyped_storage().data_ptr() for planes in worker.runner.memory.planes for plane in planes]
        layers = cache_layers(worker.model).values()
        assert {layer.cache.untyped_storage().data_ptr() for layer in layers} <= set(storages)
        worker.runner.close()
        held = [value for layer in layers for value in vars(layer).values() if isinstance(value, torch.Tensor)]
        assert not {tensor.untyped_storage().data_ptr() for tensor in held} & set(storages)


def test_other_levels_are_refused(model):
    with LLM(str(model), **OPTIONS, device="cpu") as llm, pytest.raises(RequestError, match="level must be 1"):
        llm.sleep(3)


def test_tensors_keep_their_numbers_while_their_memory_is_away():
    whole = torch.arange(100.0)
    part, other = whole[10:20].view(2, 5), torch.ones(7, dtype=torch.int8)
    copies = HostCopies([whole, part, other])
    assert whole.untyped_storage().nbytes() == part.untyped_storage().nbytes() == other.untyped_storage().nbytes() == 0
    copies.restore()
    assert torch.equal(part, torch.arange(10.0, 20.0).view(2, 5)) and other.sum() == 7
    part += 1
    assert whole[10] == 11
