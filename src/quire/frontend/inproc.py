"""The way to a core in this very process: what `LLM` uses. Reached by dotted path, so importing it costs nothing."""

import importlib
import time

from quire.config import EngineConfig
from quire.frontend.exchange import Client
from quire.messages import Question, StepOutputs, ToCore

ENGINE = "quire.core.engine"


class InprocClient(Client):
    def __init__(self, config: EngineConfig) -> None:
        self.engine = importlib.import_module(ENGINE).Engine(config)

    def send(self, message: ToCore) -> None:
        self.engine.handle(message)

    def ask(self, question: Question) -> str:
        """The problem of the core's answer; empty if there is none."""
        return self.engine.handle(question).problem

    def step(self) -> StepOutputs:
        started = time.perf_counter()
        outputs = self.engine.step()
        if outputs.stats.step_tokens:
            outputs.step_s = time.perf_counter() - started
        return outputs

    def close(self) -> None:
        self.engine.close()
