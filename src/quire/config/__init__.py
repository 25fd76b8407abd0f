"""Every option, declared once and frozen. Anyone may import this; it imports nothing of ours but `errors`.

Command-line flags, `LLM(**kwargs)` and `--help` are generated from these fields (`flags.py`);
the only place where an "auto" becomes a value is `resolve.py`.
"""

from quire.config.args import AsyncEngineArgs, EngineArgs
from quire.config.engine import (
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    StructuredConfig,
    quantization_file,
)
from quire.config.fields import knob, resolved
from quire.config.serving import ServingConfig

__all__ = [
    "AsyncEngineArgs",
    "CacheConfig",
    "DeviceConfig",
    "EngineArgs",
    "EngineConfig",
    "ModelConfig",
    "SchedulerConfig",
    "ServingConfig",
    "SpeculativeConfig",
    "StructuredConfig",
    "knob",
    "quantization_file",
    "resolved",
]
