"""Layers by themselves, attached and loaded as the worker does it with a whole model."""

import torch
from torch import Tensor, nn

from quire.config import EngineConfig
from quire.layers.base import Runtime
from quire.layers.weights import plain
from quire.worker.build import attach, make_runtime
from quire.worker.load import load_weights


def runtime(**options: object) -> Runtime:
    defaults = {"device": "cpu", "dtype": "float32", "quantization": "none", "max_model_len": 256, "block_size": 16}
    return make_runtime(EngineConfig.from_kwargs(**{**defaults, **options}), {}, lambda path: path)


def attached(layer: nn.Module, **options: object) -> nn.Module:
    attach(layer, runtime(**options))
    return layer


def filled(layer: nn.Module, state: dict[str, Tensor]) -> nn.Module:
    """In float32: every name is wanted, everything wanted is there."""
    attached(layer)
    load_weights(layer, ((name, plain(tensor.detach())) for name, tensor in state.items()))
    assert not any(parameter.is_meta for parameter in layer.parameters())
    return layer


def raw(tensor: Tensor):
    return plain(tensor.detach().to(torch.float32)).read()
