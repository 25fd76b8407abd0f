"""Quire: an LLM inference and serving engine in Python that one person can read.

Public names are imported when first used, so `import quire` is instant.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.api.llm import LLM
    from quire.config import AsyncEngineArgs, EngineArgs, EngineConfig
    from quire.frontend.async_llm import AsyncLLM, AsyncLLMEngine
    from quire.frontend.inputs import TextPrompt, TokensPrompt
    from quire.outputs import BeamSearchOutput, CompletionOutput, RequestOutput
    from quire.params import (
        BeamSearchParams,
        RepetitionDetectionParams,
        RequestOutputKind,
        SamplingParams,
        StructuredOutputs,
        StructuredOutputsParams,
    )
    from quire.sampling.custom import LogitsProcessor

__version__ = "0.1.0"

_HOMES = {
    "AsyncEngineArgs": "quire.config",
    "AsyncLLM": "quire.frontend.async_llm",
    "AsyncLLMEngine": "quire.frontend.async_llm",
    "BeamSearchOutput": "quire.outputs",
    "BeamSearchParams": "quire.params",
    "CompletionOutput": "quire.outputs",
    "EngineArgs": "quire.config",
    "EngineConfig": "quire.config",
    "LLM": "quire.api.llm",
    "LogitsProcessor": "quire.sampling.custom",
    "RepetitionDetectionParams": "quire.params",
    "RequestOutput": "quire.outputs",
    "RequestOutputKind": "quire.params",
    "SamplingParams": "quire.params",
    "StructuredOutputs": "quire.params",
    "StructuredOutputsParams": "quire.params",
    "TextPrompt": "quire.frontend.inputs",
    "TokensPrompt": "quire.frontend.inputs",
}

__all__ = [
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "BeamSearchOutput",
    "BeamSearchParams",
    "CompletionOutput",
    "EngineArgs",
    "EngineConfig",
    "LLM",
    "LogitsProcessor",
    "RepetitionDetectionParams",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputs",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
]


def __getattr__(name: str) -> object:
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'quire' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
