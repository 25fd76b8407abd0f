"""The way to a core in this very process: what `LLM` uses. Reached by dotted path, so importing it costs nothing."""

import importlib

from quire.config import EngineConfig
from quire.frontend.exchange import Client
from quire.messages import StepOutputs, ToCore

ENGINE = "quire.core.engine"


class InprocClient(Client):
    def __init__(self, config: EngineConfig) -> None:
        self.engine = importlib.import_module(ENGINE).Engine(config)

    def send(self, message: ToCore) -> None:
        self.engine.handle(message)

    def step(self) -> StepOutputs:
        return self.engine.step()

    def close(self) -> None:
        self.engine.close()
