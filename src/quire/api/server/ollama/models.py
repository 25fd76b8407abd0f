"""/api/tags, /api/show and /api/version: what Ollama's clients ask about a server and its models.

Called by `app.py`. Names are those of `/v1/models`; one without a tag has the tag latest.
"""

import hashlib
from datetime import UTC, datetime
from typing import Any

import msgspec

from quire import __version__
from quire.api.server.calls import Answer, Call, Service
from quire.api.server.errors import UnknownModelError
from quire.api.server.fields import decode
from quire.api.server.ollama.body import ShowRequest
from quire.errors import RequestError
from quire.frontend.model import ModelInfo

LATEST = ":latest"

# Keys of config.json, and what Ollama calls them behind the name of the architecture.
_SIZES = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "vocab_size": "vocab_size",
}


class OllamaVersion(msgspec.Struct):
    version: str


class Details(msgspec.Struct):
    family: str
    families: list[str]
    quantization_level: str
    parent_model: str = ""
    format: str = ""
    parameter_size: str = ""


class OllamaModel(msgspec.Struct):
    name: str
    model: str  # the same
    modified_at: str
    digest: str
    details: Details


class OllamaModelList(msgspec.Struct):
    models: list[OllamaModel]


class ModelCardOfOllama(msgspec.Struct):
    modified_at: str
    details: Details
    model_info: dict[str, Any]
    capabilities: list[str]
    template: str
    parameters: str  # a line for each default of the model


def served_name(service: Service, asked: str | None) -> str:
    """The name of the model without a tag that only Ollama has."""
    if asked is not None and asked not in service.names:
        asked = asked.removesuffix(LATEST)
        if asked not in service.names:
            raise UnknownModelError(f"model {asked!r:.200} not found: {', '.join(service.names)} can be asked for")
    return service.model_name(asked)


async def ollama_version(call: Call) -> Answer:
    return Answer.json(OllamaVersion(__version__))


async def ollama_tags(call: Call) -> Answer:
    return Answer.json(OllamaModelList([_listed(call.service, name) for name in call.service.names]))


async def ollama_show(call: Call) -> Answer:
    body = await decode(call.body, ShowRequest)
    asked = body.model or body.name
    if not asked:
        raise RequestError("model is missing: send it", "model")
    served_name(call.service, asked)
    model = call.service.llm.model
    capabilities = ["completion"]
    if model.tool_format is not None:
        capabilities.append("tools")
    if model.reasoning_format is not None:
        capabilities.append("thinking")
    card = ModelCardOfOllama(
        modified_at=_started(call.service),
        details=_details(model),
        model_info=_sizes(model),
        capabilities=capabilities,
        template=model.template.source or "",
        parameters="\n".join(f"{name} {value}" for name, value in model.sampling_defaults.items()),
    )
    return Answer.json(card)


def _listed(service: Service, name: str) -> OllamaModel:
    has_tag = ":" in name.rpartition("/")[2]
    shown = name if has_tag else name + LATEST
    model = service.llm.model
    digest = hashlib.sha256(model.name.encode()).hexdigest()
    return OllamaModel(shown, shown, _started(service), digest, _details(model))


def _details(model: ModelInfo) -> Details:
    family = _family(model)
    return Details(family, [family], model.config.model.quantization or "")


def _sizes(model: ModelInfo) -> dict[str, Any]:
    family = _family(model)
    found = {f"{family}.{name}": model.hf_config[key] for key, name in _SIZES.items() if key in model.hf_config}
    return {"general.architecture": family, f"{family}.context_length": model.max_model_len, **found}


def _family(model: ModelInfo) -> str:
    return str(model.hf_config.get("model_type", ""))


def _started(service: Service) -> str:
    return datetime.fromtimestamp(service.started_s, UTC).isoformat().replace("+00:00", "Z")
