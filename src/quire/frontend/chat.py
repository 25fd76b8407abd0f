"""Conversations to prompts: checks messages, renders the model's chat template in a sandbox, and encodes the result.

Called by the ways in for every chat; the template is compiled once. What a message says stays text, even where it
spells a special token: only what the template itself writes is parsed. Must not know sampling or any protocol.
"""

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any, Literal, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

from quire.errors import ConfigError, RequestError
from quire.frontend.sandbox import Sandbox, TooMuchError, check_pattern
from quire.frontend.tokenizer import MAX_TEMPLATE_BYTES, Tokenizer

Message = Mapping[str, Any]
# How a template wants the content of a message: as text, or as a list of parts; auto: whichever it shows.
ContentFormat = Literal["auto", "string", "openai"]

# What a template finds under these names is ours to say; some are arguments of other engines' template functions.
RESERVED_NAMES = frozenset(
    """
    messages conversation tools chat_template add_generation_prompt continue_final_message
    tokenize padding truncation max_length return_tensors return_dict tokenizer_kwargs return_assistant_tokens_mask
    bos_token eos_token unk_token pad_token sep_token cls_token mask_token
    raise_exception strftime_now range dict namespace cycler joiner lipsum self loop
    """.split()
)

_MAX_RENDERED_CHARS = 1 << 25  # far above any context; stops a template that loops
_MAX_DEPTH = 32  # of JSON inside a message
_ROLE = re.compile(r"[\w.-]{1,64}")
_SENTINELS = re.compile("[\U00100000-\U0010fffd]")  # a private-use plane: texts rarely hold these characters


class ChatTemplate:
    """A compiled template; `source` is None for a model that has none. Safe to share between threads."""

    def __init__(
        self,
        source: str | None,
        bos_token: str = "",
        eos_token: str = "",
        content_format: ContentFormat = "auto",
        **special_tokens: str,
    ) -> None:
        self.content_format = content_format
        self._special_tokens = {**special_tokens, "bos_token": bos_token, "eos_token": eos_token}
        self.source = source
        self._template = None
        self._own_sentinels = set(_SENTINELS.findall(source or ""))
        if source is None:
            return
        if len(source) > MAX_TEMPLATE_BYTES:
            raise ConfigError(
                f"the chat template is longer than {MAX_TEMPLATE_BYTES:,} characters: "
                "give another with --chat-template."
            )
        try:
            self._sandbox = _sandbox()
            self._template = self._sandbox.from_string(source)
        except Exception as error:  # jinja's own errors, and Python's when it compiles what jinja made of the template
            raise ConfigError(
                f"the chat template is broken: {error!s:.200}; give another with --chat-template."
            ) from None

    @classmethod
    def of(
        cls, tokenizer: Tokenizer, source: str | None = None, content_format: ContentFormat = "auto"
    ) -> "ChatTemplate":
        """The tokenizer's own template, or `source` with the tokenizer's special tokens."""
        source = source if source is not None else tokenizer.chat_template
        return cls(source, content_format=content_format, **tokenizer.special_tokens)

    @cached_property
    def _takes(self) -> frozenset[type]:
        """What the content of a message may be: text, a list of parts, or either."""
        if self.content_format != "auto":
            return frozenset([str if self.content_format == "string" else list])
        as_text, as_part = self._try_content("word"), self._try_content(_as_parts("word"))
        if "word" in as_text:
            return frozenset([str, list] if as_part == as_text else [str])
        return frozenset([list if "word" in as_part else str])

    @property
    def shows_content(self) -> bool:
        """Whether what a message says is in the prompt, if its content comes in the form that was chosen."""
        return "word" in self._try_content("word" if str in self._takes else _as_parts("word"))

    def _try_content(self, content: Any) -> str:
        variables = {**self._special_tokens, "messages": [{"role": "user", "content": content}], "tools": None}
        try:
            return self._run({**variables, "add_generation_prompt": False}, len("word"))
        except RequestError:
            return ""

    @cached_property
    def _takes_no_content(self) -> bool:
        """Whether a message which is only a call may be without content. Some templates know it by that; others
        expect a text, if an empty one, because they know no calls or since they look for something in it."""
        if "tool_calls" not in (self.source or ""):
            return False
        return self._try_call(None) or not self._try_call("")

    def _try_call(self, content: str | None) -> bool:
        """Whether a call with this content can be rendered, with and without thinking before it."""
        call = {"id": "call00001", "type": "function", "function": {"name": "name", "arguments": {}}}
        answer = {"role": "assistant", "content": content, "tool_calls": [call]}
        result = {"role": "tool", "content": "word", "name": "name", "tool_call_id": "call00001"}
        try:
            for thoughts in ({}, {"reasoning": "word", "reasoning_content": "word"}):
                messages = [{"role": "user", "content": "word"}, {**answer, **thoughts}, result]
                self._run({**self._special_tokens, "messages": messages, "tools": None}, len("word"))
        except RequestError:
            return False
        return True

    @cached_property
    def takes_late_system(self) -> bool:
        """Whether system messages may come later than at the beginning, and are then shown."""
        words = ["first", "asked", "later", "again"]
        roles = ["system", "user", "system", "user"]
        try:
            text = self.render([{"role": role, "content": word} for role, word in zip(roles, words)])
        except RequestError:
            return False
        return all(word in text for word in words)

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt as text. With `continue_final_message` it ends where the last message ends."""
        conversation = _Conversation.checked(messages, tools, template_kwargs)
        return self._render(conversation, add_generation_prompt, continue_final_message)

    def _render(self, conversation: "_Conversation", add_generation_prompt: bool, continue_final_message: bool) -> str:
        end = ""
        if continue_final_message:
            if add_generation_prompt:
                raise RequestError("add_generation_prompt and continue_final_message exclude each other: set one.")
            (end,) = conversation.unused_sentinels(1, self._own_sentinels)
            conversation = conversation.with_end(end)
        variables = {
            **conversation.template_kwargs,
            **self._special_tokens,
            "messages": [self._shown(message) for message in conversation.messages],
            "tools": conversation.tools,
            "add_generation_prompt": add_generation_prompt,
        }
        text = self._run(variables, sum(map(len, conversation.texts)))
        if not end:
            return text
        if end not in text:
            raise RequestError("the chat template leaves out the final message, so it cannot be continued.")
        return text[: text.rindex(end)]

    def _shown(self, message: dict[str, Any]) -> dict[str, Any]:
        """A message as the template takes it."""
        content = message.get("content")
        if content is None:
            return message if self._takes_no_content else {**message, "content": ""}
        if type(content) in self._takes:
            return message
        return {**message, "content": _as_parts(content) if isinstance(content, str) else _as_text(content)}

    def _run(self, variables: dict[str, Any], conversation_chars: int) -> str:
        if self._template is None:
            message = "this model has no chat template: its operator may give it one; send a plain prompt."
            raise RequestError(message, hint="--chat-template")
        chunks: list[str] = []
        num_chars = 0
        try:
            for chunk in self._sandbox.render(self._template, variables, conversation_chars):
                chunks.append(chunk)
                num_chars += len(chunk)
                if num_chars > _MAX_RENDERED_CHARS:
                    raise RequestError(f"the chat template wrote over {_MAX_RENDERED_CHARS} characters: send less.")
        except RequestError:
            raise
        except _RefusedError as error:
            raise RequestError(f"the chat template refuses these messages: {error!s:.500}") from None
        except TooMuchError as error:
            raise RequestError(f"the chat template is stopped: {error}; send less.", hint="--chat-template") from None
        except jinja2.TemplateError as error:
            raise RequestError(f"the chat template cannot render these messages: {error!s:.500}") from None
        except Exception as error:  # a template can do anything Python can, and its messages may hold addresses
            raise RequestError(f"the chat template cannot render these messages ({type(error).__name__}).") from None
        return "".join(chunks)


def encode_chat(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: Sequence[Message],
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    max_tokens: int | None = None,
) -> list[int]:
    """The prompt as token ids: special tokens are those the template writes, never those a message spells.

    `max_tokens`: a prompt that is certain to have as many is refused before it is tokenized.
    """
    conversation = _Conversation.checked(messages, tools, template_kwargs)
    spellings = tokenizer.special_pattern
    if not any(map(spellings.search, conversation.texts)):
        text = template._render(conversation, add_generation_prompt, continue_final_message)
        if max_tokens is not None:
            tokenizer.check_fits(text, max_tokens)
        return tokenizer.encode(text, add_special_tokens=False)
    marks = conversation.unused_sentinels(2, template._own_sentinels)
    spelling_in_marks = rf"{marks[0]}\g<0>{marks[1]}"
    marked = conversation.mapped(lambda text: spellings.sub(spelling_in_marks, text))
    text = template._render(marked, add_generation_prompt, continue_final_message)
    return _encode_marked(tokenizer, spellings, text, marks, max_tokens)


def _encode_marked(
    tokenizer: Tokenizer, spellings: re.Pattern[str], text: str, marks: Sequence[str], max_tokens: int | None
) -> list[int]:
    """Encodes text whose marked spellings are plain, without the marks.

    The text is cut only at the template's own special tokens, so that a plain spelling is tokenized together with what
    is around it. Templates may cut or drop marked text; so a mark also says that no special token reaches across it.
    """
    clean, mark_positions, plain_ends = _unmark(text, marks)
    if max_tokens is not None:
        tokenizer.check_fits(clean, max_tokens)
    ids: list[int] = []
    start = 0  # of the text not encoded yet
    gap_start = 0  # of the text after the last special token
    position = 0  # of the search
    while True:
        match = spellings.search(clean, position)
        if match is not None:
            is_plain = plain_ends.get(match.start()) == match.end()
            if is_plain or _inside(mark_positions, *match.span()):
                position = match.end() if is_plain else match.start() + 1
                continue
        gap_end = match.start() if match is not None else len(clean)
        if _inside(mark_positions, gap_start - 1, gap_end + 1):
            ids += tokenizer.encode(clean[start:gap_start], add_special_tokens=False)
            ids += tokenizer.encode_as_text(clean[gap_start:gap_end])
            start = gap_end
        if match is None:
            return ids + tokenizer.encode(clean[start:], add_special_tokens=False)
        gap_start = position = match.end()


def _unmark(text: str, marks: Sequence[str]) -> tuple[str, list[int], dict[int, int]]:
    """The text without marks, where they were, and start -> end of what stood between two."""
    parts = re.split(f"([{''.join(marks)}])", text)
    positions: list[int] = []
    plain_ends: dict[int, int] = {}
    position = 0
    opened_at: int | None = None
    for part in parts:
        if part == marks[0]:
            opened_at = position
            positions.append(position)
        elif part == marks[1]:
            if opened_at is not None:
                plain_ends[opened_at] = position
            opened_at = None
            positions.append(position)
        else:
            position += len(part)
    return "".join(parts[::2]), positions, plain_ends


def _inside(positions: Sequence[int], start: int, end: int) -> bool:
    """Whether one of the sorted `positions` lies strictly between the two."""
    idx = bisect_right(positions, start)
    return idx < len(positions) and positions[idx] < end


def check_template_arguments(template_kwargs: Any) -> None:
    if template_kwargs is not None and not isinstance(template_kwargs, Mapping):
        raise RequestError("the arguments of the chat template must be an object.")
    for name in template_kwargs or {}:
        is_usable = isinstance(name, str) and name.isidentifier() and name not in RESERVED_NAMES
        if not is_usable:
            raise RequestError(
                f"{name!r:.80} cannot be an argument of the chat template: it is reserved or no identifier."
            )


@dataclass(frozen=True)
class _Conversation:
    """What the user sent, checked: every string in it is text a tokenizer can take."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    template_kwargs: dict[str, Any]
    texts: tuple[str, ...]  # all strings in the above

    @classmethod
    def checked(cls, messages: Any, tools: Any, template_kwargs: Any) -> "_Conversation":
        if not isinstance(messages, (list, tuple)) or not messages:
            raise RequestError("messages must be a list with at least one message.", "messages")
        checked_messages = [_message(idx, message) for idx, message in enumerate(messages)]
        tools = tools or []
        if not isinstance(tools, (list, tuple)) or not all(isinstance(tool, Mapping) for tool in tools):
            raise RequestError("tools must be a list of objects.")
        check_template_arguments(template_kwargs)
        texts: list[str] = []

        def check(text: str) -> str:
            try:
                text.encode()
            except UnicodeEncodeError:
                raise RequestError(
                    "messages must not hold lone surrogates (half of a UTF-16 pair).", "messages"
                ) from None
            texts.append(text)
            return text

        return cls(
            _map_texts(checked_messages, check),
            _map_texts(list(tools), check) if tools else None,
            _map_texts(dict(template_kwargs or {}), check),
            tuple(texts),
        )

    def mapped(self, change: Callable[[str], str]) -> "_Conversation":
        return _Conversation(
            _map_texts(self.messages, change),
            _map_texts(self.tools, change),
            {name: _map_texts(value, change) for name, value in self.template_kwargs.items()},
            tuple(map(change, self.texts)),
        )

    def with_end(self, mark: str) -> "_Conversation":
        """With a mark after the final message, so that its end is found in the rendered text."""
        content = self.messages[-1].get("content")
        if content is None:
            raise RequestError("continue_final_message needs a final message with text in it.")
        if isinstance(content, list):
            marked: Any = [*content[:-1], *_as_parts(content[-1]["text"] + mark)]
        else:
            marked = content + mark
        messages = [*self.messages[:-1], {**self.messages[-1], "content": marked}]
        return _Conversation(messages, self.tools, self.template_kwargs, self.texts)

    def unused_sentinels(self, count: int, taken: set[str]) -> list[str]:
        """Characters that occur nowhere in the conversation or the template."""
        used = taken.union(*map(_SENTINELS.findall, self.texts))
        candidates = map(chr, range(0x100000, 0x100000 + len(used) + count))
        return [char for char in candidates if char not in used][:count]


def _message(idx: int, message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not all(isinstance(key, str) for key in message):
        raise RequestError(f"message {idx} must be an object with role and content.")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not _ROLE.fullmatch(role):
        raise RequestError(f"the role of message {idx} must be a word such as user, not {role!r:.80}.")
    checked = dict(message)
    thoughts = _thoughts(idx, message)
    if thoughts is not None:
        checked |= {"reasoning": thoughts, "reasoning_content": thoughts}
    if content is None and not message.get("tool_calls"):
        if not thoughts:
            raise RequestError(f"message {idx} has no content.")
        content = ""
    if content is not None:
        checked["content"] = _content(idx, content)
    if message.get("tool_calls"):
        checked["tool_calls"] = _tool_calls(idx, message["tool_calls"])
    return checked


def _thoughts(idx: int, message: Message) -> str | None:
    """An earlier answer's thinking. It has two names; templates know either, and are given both."""
    found = next((message[name] for name in ("reasoning", "reasoning_content") if message.get(name) is not None), None)
    if found is not None and not isinstance(found, str):
        raise RequestError(f"the reasoning of message {idx} must be text.")
    return found


def _content(idx: int, content: Any) -> str | list[dict[str, str]]:
    """Text, or a list of parts of text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)):
        raise RequestError(f"the content of message {idx} must be a string or a list of text parts.")
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else part
        has_text = isinstance(part, Mapping) and isinstance(part.get("text"), str)
        if kind != "text" or not has_text:
            raise RequestError(
                f"message {idx} has a part of type {kind!r:.80}: only text parts with a text are supported."
            )
    return [part for each in content for part in _as_parts(each["text"])] or ""


def _as_parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def _as_text(parts: list[dict[str, str]]) -> str:
    return "\n".join(part["text"] for part in parts)


def _tool_calls(idx: int, calls: Any) -> list[dict[str, Any]]:
    """OpenAI's protocol sends a call's arguments as a string of JSON, templates want the object in it."""
    if not isinstance(calls, (list, tuple)) or not all(isinstance(call, Mapping) for call in calls):
        raise RequestError(f"the tool_calls of message {idx} must be a list of objects.")
    checked = []
    for call in map(dict, calls):
        function = call.get("function")
        if isinstance(function, Mapping) and isinstance(function.get("arguments"), str):
            try:
                arguments = json.loads(function["arguments"] or "{}")
            except (ValueError, RecursionError):
                raise RequestError(f"the arguments of a tool call in message {idx} are not JSON.") from None
            call["function"] = {**function, "arguments": arguments}
        checked.append(call)
    return checked


def _map_texts(value: Any, change: Callable[[str], str], depth: int = 0) -> Any:
    """A copy of plain JSON with every string changed, keys of objects too."""
    if isinstance(value, str):
        return change(value)
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if depth > _MAX_DEPTH:
        raise RequestError(f"messages are nested deeper than {_MAX_DEPTH} levels: flatten them.", "messages")
    if isinstance(value, Mapping):
        return {_map_texts(key, change, _MAX_DEPTH): _map_texts(item, change, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_map_texts(item, change, depth + 1) for item in value]
    raise RequestError(f"messages must hold plain JSON values, not {type(value).__name__}.", "messages")


class _RefusedError(jinja2.TemplateError):
    """A template's own `raise_exception`."""


class _GenerationTag(Extension):
    """{% generation %} marks the assistant's words for training; here only its body counts."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _sandbox() -> Sandbox:
    sandbox = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"])
    sandbox.add_filter("tojson", _to_json)
    sandbox.globals["raise_exception"] = _raise_exception
    sandbox.globals["strftime_now"] = lambda pattern: datetime.now().strftime(check_pattern(pattern))
    return sandbox


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Jinja's own would escape HTML and non-ASCII characters, which models have not seen."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise _RefusedError(message)
