"""/api/chat and /api/generate: answers in Ollama's protocol, as lines of JSON or whole.

Called by `app.py`. What a body asks for is done by `chat.py` and `completions.py`, of the bodies that `translate.py`
makes of it.
"""

from quire.api.server import completions
from quire.api.server.calls import Answer, Call
from quire.api.server.chat import start
from quire.api.server.fields import decode
from quire.api.server.generation import built, finish, submit
from quire.api.server.ollama.answers import ChatLine, ChatLines, GenerateLine, GenerateLines, Lines, Source, created_at
from quire.api.server.ollama.body import GenerateRequest, OllamaChatRequest
from quire.api.server.ollama.models import served_name
from quire.api.server.ollama.translate import to_chat, to_completion
from quire.api.server.reading import Reading
from quire.api.server.sse import EventStream


async def ollama_chat(call: Call) -> Answer | EventStream:
    body = await decode(call.body, OllamaChatRequest)
    served_name(call.service, body.model)
    shown = body.model or call.service.names[0]
    if not body.messages:
        loaded = ChatLine(model=shown, created_at=created_at(call), done=True, done_reason="load")
        return Answer.json(loaded)
    source = await _converse(call, body)
    return await _answer(call, ChatLines(source, shown, created_at(call)), body.stream is not False)


async def ollama_generate(call: Call) -> Answer | EventStream:
    body = await decode(call.body, GenerateRequest)
    served_name(call.service, body.model)
    shown = body.model or call.service.names[0]
    if not body.prompt:
        loaded = GenerateLine(model=shown, created_at=created_at(call), done=True, done_reason="load")
        return Answer.json(loaded)
    source = await (_continue(call, body) if body.raw else _converse(call, body))
    return await _answer(call, GenerateLines(source, shown, created_at(call)), body.stream is not False)


async def _converse(call: Call, body: OllamaChatRequest | GenerateRequest) -> Source:
    model = call.service.llm.model
    chat = await start(call, to_chat(body, model.max_model_len, model.reasoning_format is not None), cuts_answer=True)
    return Source(chat.stream, chat.reading, model.tokenizer, bool(body.logprobs))


async def _continue(call: Call, body: GenerateRequest) -> Source:
    """The prompt as it is, without the template."""
    model = call.service.llm.model
    asked = to_completion(body, model.max_model_len)
    prompts, params = await completions.prepare(call, asked, cuts_answer=True)
    (stream,) = await submit(call, [prompt.token_ids for prompt in prompts], params, asked)
    return Source(stream, Reading(None, True, False), model.tokenizer, bool(body.logprobs))


async def _answer(call: Call, lines: Lines, streams: bool) -> Answer | EventStream:
    if streams:
        return EventStream(lines, call)
    await finish(call, [lines.source.stream])
    return await built(call, lines.whole)
