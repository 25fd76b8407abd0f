"""Lines of the log as JSON objects, for programs that read them."""

import datetime
import logging

import msgspec


class JsonFormatter(logging.Formatter):
    """One object per line; a record's `fields` are members of it, and `process` says which process wrote it, if set."""

    def __init__(self, process: str = "") -> None:
        super().__init__()
        self.process = process

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.datetime.fromtimestamp(record.created, datetime.UTC).isoformat(timespec="milliseconds")
        entry = {"time": time, "level": record.levelname.lower(), "logger": record.name, "message": record.getMessage()}
        if self.process:
            entry["process"] = self.process
        entry |= getattr(record, "fields", {})
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(entry).decode()
