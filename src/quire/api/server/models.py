"""/v1/models: the names this server's model answers to.

Called by `app.py`.
"""

from typing import Literal

import msgspec

from quire.api.server.calls import Answer, Call, Service


class ModelCard(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "quire"
    root: str
    parent: str | None = None
    max_model_len: int


class ModelList(msgspec.Struct):
    data: list[ModelCard]
    object: Literal["list"] = "list"


async def list_models(call: Call) -> Answer:
    return Answer.json(ModelList([_card(call.service, name) for name in call.service.names]))


async def get_model(call: Call) -> Answer:
    return Answer.json(_card(call.service, call.service.model_name(call.argument)))


def _card(service: Service, name: str) -> ModelCard:
    model = service.llm.model
    return ModelCard(id=name, created=service.started_s, root=model.name, max_model_len=model.max_model_len)
