"""Activation functions by the names config.json gives them."""

from collections.abc import Callable
from functools import partial

from torch import Tensor
from torch.nn import functional

from quire.errors import UnsupportedModelError

Activation = Callable[[Tensor], Tensor]

_gelu_tanh = partial(functional.gelu, approximate="tanh")
ACTIVATIONS: dict[str, Activation] = {
    "silu": functional.silu,
    "swish": functional.silu,
    "gelu": functional.gelu,
    "gelu_new": _gelu_tanh,
    "gelu_fast": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x).square(),
}


def activation(name: str) -> Activation:
    if name not in ACTIVATIONS:
        raise UnsupportedModelError(f"the activation {name!r:.40} is not supported: {', '.join(ACTIVATIONS)} are")
    return ACTIVATIONS[name]
