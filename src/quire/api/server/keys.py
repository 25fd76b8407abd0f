"""Who may call: the keys, whose they are and what each may ask for in a minute.

The guard asks for every call; `run.py` has the key file looked at every second. Keys are kept as digests of equal
length, and a key is compared with all of them every time, so that the time it takes tells nothing.
"""

import asyncio
import dataclasses
import hashlib
import hmac
import re
from pathlib import Path
from typing import Literal, NamedTuple

from quire import env
from quire.api.server import logs
from quire.api.server.errors import Refused
from quire.api.server.limits import Limits
from quire.api.server.watched import WatchedFiles
from quire.config.server import ServerConfig, check_key
from quire.errors import ConfigError

# No key, a key, an operator's key; "watch": an operator's where there are keys at all.
Policy = Literal["open", "user", "admin", "watch"]

MAX_KEY_FILE_BYTES = 1 << 20
MAX_LIMIT = 10**12
LINE = "write KEY, and after it label=NAME, rpm=N or tpm=N where they are wanted"

_LABEL = re.compile(r"[A-Za-z0-9._@-]{1,64}")  # what can be read in a log


class KeyLine(NamedTuple):
    """A line of the key file."""

    digest: bytes
    label: str = ""
    rpm: int | None = None
    tpm: int | None = None


class Caller(NamedTuple):
    """Who a key belongs to. `owner`: a digest of it; empty where no key is needed."""

    owner: str = ""
    label: str = ""
    limits: Limits | None = None


NOBODY = Caller()


class Keys:
    def __init__(self, config: ServerConfig) -> None:
        self.given = [_digest(key.encode()) for key in config.api_key]
        self.admins = [_digest(config.admin_api_key.encode())] if config.admin_api_key else []
        self.users: dict[bytes, Caller] = {}  # the operators', too, where users need a key
        self.file: KeyFile | None = None
        lines: list[KeyLine] = []
        if config.api_key_file:
            self.file = KeyFile(config.api_key_file)
            lines = self.file.read()
        self._take(lines)

    def check(self, policy: Policy | None, headers: dict[bytes, bytes]) -> Caller:
        """Whose key it is. Refused: it is missing or wrong."""
        is_admin = policy == "admin" or (policy == "watch" and bool(self.users or self.admins))
        needs_key = is_admin or bool(self.users)
        if policy == "open" or not needs_key:
            return NOBODY
        if is_admin and not self.admins:
            text = "this path is for operators, and this server has no key for them"
            raise Refused(403, "no_admin_key", text, "permission_error", hint="--admin-api-key")
        accepted = self.admins if is_admin else self.users
        for digest in [_digest(key) for key in _sent(headers)]:
            if any([hmac.compare_digest(digest, key) for key in accepted]):
                return Caller(digest.hex()) if is_admin else self.users[digest]
        which = "an operator's key" if is_admin else "a valid API key"
        text = f"{which} is needed: send it as Authorization: Bearer KEY, or as X-Api-Key: KEY"
        raise Refused(401, "invalid_api_key", text, "authentication_error")

    async def refresh(self) -> None:
        """Called every second: takes what is new in the key file. A file that cannot be used changes nothing."""
        if self.file is None:
            return
        try:
            lines = await asyncio.to_thread(self.file.read_changed)
        except ConfigError as error:
            logs.log.error("%s; until then the keys are those from before", error)
            return
        if lines is not None:
            self._take(lines)
            logs.log.info("the key file was read again: %d keys", len(lines))

    def _take(self, lines: list[KeyLine]) -> None:
        """What a key used of its limits in the last minute stays counted."""
        before = self.users
        users = {digest: Caller(digest.hex()) for digest in self.given}
        for line in lines:
            limits = before.get(line.digest, NOBODY).limits or Limits(line.rpm, line.tpm)
            limits.rpm, limits.tpm = line.rpm, line.tpm
            has_limits = line.rpm is not None or line.tpm is not None
            users[line.digest] = Caller(line.digest.hex(), line.label, limits if has_limits else None)
        if users:
            for digest in self.admins:
                users.setdefault(digest, Caller(digest.hex()))
        self.users = users


class KeyFile:
    """One key per line; empty lines and lines that begin with # are ignored. A file without keys is an error: it would
    make the server open to all."""

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            self.file = WatchedFiles([Path(path).expanduser()], MAX_KEY_FILE_BYTES)
        except RuntimeError:
            raise self._unreadable("there is no such home") from None

    def read(self) -> list[KeyLine]:
        """Called once, at the start."""
        return self._parse((self.file.changed() or [b""])[0])

    def read_changed(self) -> list[KeyLine] | None:
        """The keys, if the file has changed. ConfigError: it cannot be used, or not all of it was written yet."""
        contents = self.file.changed()
        if contents is None:
            return None
        content = contents[0]
        lines = self._parse(content)
        if isinstance(content, bytes) and not content.endswith(b"\n"):
            raise ConfigError(f"the last line of the key file {self.path!r} has no end: write a line feed after it")
        return lines

    def _parse(self, content: bytes | OSError) -> list[KeyLine]:
        if isinstance(content, OSError):
            raise self._unreadable(content.strerror or "it is no file")
        try:
            text = content.decode()
        except UnicodeDecodeError:
            raise self._unreadable("it is not a UTF-8 text") from None
        found: dict[bytes, KeyLine] = {}
        for number, line in enumerate(text.split("\n"), 1):
            words = line.split()
            if not words or words[0].startswith("#"):
                continue
            try:
                key = _parse_line(words)
            except ConfigError as error:  # which must not repeat what is there: it may be a key
                raise ConfigError(f"line {number} of the key file {self.path!r}: {error}") from None
            if key.digest in found:
                raise ConfigError(f"line {number} of the key file {self.path!r} repeats a key: remove one of the two")
            found[key.digest] = key
        if not found:
            raise ConfigError(f"the key file {self.path!r} holds no key: write one per line")
        return list(found.values())

    def _unreadable(self, why: str) -> ConfigError:
        return ConfigError(f"the key file {self.path!r} cannot be read: {why}")


def with_environment(config: ServerConfig) -> ServerConfig:
    """The options, with the key of an environment variable where no flag gives one; the log says which."""
    if unknown := env.vllm_variables():
        logs.log.warning("these variables have no effect here: %s", ", ".join(unknown))
    found = env.api_key()
    if found is None or config.api_key or config.api_key_file:
        return config
    name, key = found
    try:
        check_key(key)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None
    logs.log.info("clients need the key that is in %s", name)
    return dataclasses.replace(config, api_key=[key])


def _parse_line(words: list[str]) -> KeyLine:
    key, *rest = words
    check_key(key)
    settings = {name: value for name, is_set, value in (word.partition("=") for word in rest) if is_set}
    if len(settings) < len(rest) or settings.keys() - {"label", "rpm", "tpm"}:
        raise ConfigError(LINE)
    label = settings.pop("label", None)
    if label is not None and not _LABEL.fullmatch(label):
        raise ConfigError("a label is at most 64 letters, digits and characters of ._@-")
    limits: dict[str, int] = {}
    for name, value in settings.items():
        is_number = value.isascii() and value.isdigit() and len(value) <= 13
        if not is_number or not 1 <= int(value) <= MAX_LIMIT:
            raise ConfigError(f"{name} must be a whole number from 1 to {MAX_LIMIT:,}")
        limits[name] = int(value)
    return KeyLine(_digest(key.encode()), label or "", limits.get("rpm"), limits.get("tpm"))


def _sent(headers: dict[bytes, bytes]) -> list[bytes]:
    """The keys of a call: OpenAI's clients send one as a bearer token, Anthropic's in a header of its own. Where both
    are there, the call is of the first that is valid."""
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    sent = [token] if scheme.lower() == b"bearer" else []
    if b"x-api-key" in headers:
        sent.append(headers[b"x-api-key"])
    return [key.strip() for key in sent]


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
