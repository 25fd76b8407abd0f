"""The way to a core in this very process: what `LLM` uses. Reached by dotted path, so importing it costs nothing."""

import importlib

from quire.config import EngineConfig
from quire.messages import Abort, AddRequest, StepOutputs, Vocabulary

ENGINE = "quire.core.engine"


class InprocClient:
    def __init__(self, config: EngineConfig) -> None:
        self.engine = importlib.import_module(ENGINE).Engine(config)
        self.knows_vocabulary = False

    def add(self, message: AddRequest) -> None:
        self.engine.add(message)

    def learn(self, vocabulary: Vocabulary) -> None:
        """To be told before the first request with a constraint."""
        self.engine.learn(vocabulary)
        self.knows_vocabulary = True

    def abort(self, message: Abort) -> None:
        self.engine.abort(message)

    def step(self) -> StepOutputs:
        return self.engine.step()

    def close(self) -> None:
        self.engine.close()
