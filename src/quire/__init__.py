"""Quire: an LLM inference and serving engine in Python that one person can read.

Public names are imported when first used, so `import quire` is instant.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.api.llm import LLM
    from quire.config import EngineConfig
    from quire.frontend.async_llm import AsyncLLM
    from quire.outputs import CompletionOutput, RequestOutput
    from quire.params import SamplingParams, StructuredOutputs
    from quire.sampling.custom import LogitsProcessor

__version__ = "0.1.0"

_HOMES = {
    "AsyncLLM": "quire.frontend.async_llm",
    "LLM": "quire.api.llm",
    "SamplingParams": "quire.params",
    "StructuredOutputs": "quire.params",
    "LogitsProcessor": "quire.sampling.custom",
    "EngineConfig": "quire.config",
    "RequestOutput": "quire.outputs",
    "CompletionOutput": "quire.outputs",
}

__all__ = [
    "AsyncLLM",
    "CompletionOutput",
    "EngineConfig",
    "LLM",
    "LogitsProcessor",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputs",
    "__version__",
]


def __getattr__(name: str) -> object:
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'quire' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
