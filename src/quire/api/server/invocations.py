"""/invocations: one path for every kind of body, as SageMaker wants it.

Called by `app.py`, passes on to `chat.py` or `completions.py` by what the body holds.
"""

import msgspec
from msgspec import UNSET, Raw, UnsetType

from quire.api.server import chat, completions
from quire.api.server.calls import Answer, Call
from quire.api.server.completions import Prompts
from quire.api.server.fields import Count, RequestBody
from quire.api.server.prompts import Messages
from quire.api.server.sse import EventStream
from quire.errors import RequestError


class Invocation(RequestBody, kw_only=True):
    """The body of a chat, with messages, or of a completion, with a prompt; all other fields are those of either."""

    messages: Messages | UnsetType = UNSET
    prompt: Prompts | UnsetType = UNSET
    max_tokens: Count | None = None


class _Kind(msgspec.Struct):
    messages: Raw | UnsetType = UNSET
    prompt: Raw | UnsetType = UNSET


async def invoke(call: Call) -> Answer | EventStream:
    try:
        kind = msgspec.json.decode(call.body, type=_Kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the body is not a JSON object: {error}") from None
    if kind.messages is not UNSET:
        return await chat.chat(call)
    if kind.prompt is not UNSET:
        return await completions.completions(call)
    raise RequestError("give messages for a chat, or a prompt", "messages", "missing_required_parameter")
