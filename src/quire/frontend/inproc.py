"""The way to a core in this very process: what `LLM` uses. Reached by dotted path, so importing it costs nothing."""

import importlib

from quire.config import EngineConfig
from quire.messages import Abort, AddRequest, StepOutputs

ENGINE = "quire.core.engine"


class InprocClient:
    def __init__(self, config: EngineConfig) -> None:
        self.engine = importlib.import_module(ENGINE).Engine(config)

    def add(self, message: AddRequest) -> None:
        self.engine.add(message)

    def abort(self, message: Abort) -> None:
        self.engine.abort(message)

    def step(self) -> StepOutputs:
        return self.engine.step()

    def close(self) -> None:
        self.engine.close()
