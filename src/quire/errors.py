"""The exception tree: every error a user can meet, by what they can do about it.

Raised everywhere, caught by the ways in (`api/`), which turn them into exit codes and status codes.
Messages are one sentence that says what to do and never hold addresses or internals.

    QuireError
    ├── ConfigError           a flag or keyword is wrong, or two contradict each other
    │   └── CapacityError     what was asked for does not fit into the memory there is
    ├── ModelError            the model cannot be used
    │   ├── ModelNotFoundError      no such folder, file, name or hub id
    │   ├── BadModelFileError       a file is truncated, damaged or hostile
    │   └── UnsupportedModelError   a valid model we have no code for
    ├── RequestError          this request cannot be served; others are not affected
    └── EngineError           the engine itself failed
"""


class QuireError(Exception):
    """Base of all errors raised on purpose; `exit_code` is the CLI's."""

    exit_code = 1


class ConfigError(QuireError, ValueError):
    exit_code = 2


class CapacityError(ConfigError):
    pass


class ModelError(QuireError):
    exit_code = 3


class ModelNotFoundError(ModelError):
    pass


class BadModelFileError(ModelError):
    pass


class UnsupportedModelError(ModelError):
    pass


class RequestError(QuireError, ValueError):
    exit_code = 4


class EngineError(QuireError):
    exit_code = 5
