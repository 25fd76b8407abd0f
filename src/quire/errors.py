"""The exception tree: every error a user can meet, by what they can do about it.

Raised everywhere, caught by the entry points (`api/`), which turn them into exit codes and status codes.
Messages are one sentence that says what to do and never hold addresses or internals.

    QuireError
    ├── ConfigError           a flag or keyword is wrong, or two contradict each other
    │   └── CapacityError     what was asked for does not fit into the memory there is
    ├── ModelError            the model cannot be used
    │   ├── ModelNotFoundError      no such folder, file, name or hub id
    │   ├── BadModelFileError       a file is truncated, damaged or hostile
    │   └── UnsupportedModelError   a valid model we have no code for
    ├── RequestError          this request cannot be served as it is; others are not affected
    │   └── TooLongError      more tokens than the model's context takes
    ├── OverloadedError       too many wait already: come back later
    │   └── ClusterError      the machines that are to compute are not there, or not fit for it
    ├── RateLimitedError      this key has used up what it may in a minute: come back later
    ├── DeadlineError         the request's own time limit passed
    └── EngineError           the engine itself failed
        ├── WorkerDied        a worker's process ended
        ├── InternalError     something of ours failed on this request; others are not affected
        └── PoisonError       this request, alone, takes the engine down
"""


class QuireError(Exception):
    """Base of all errors raised on purpose; `exit_code` is the CLI's, `hint` the flag that a server's log names."""

    exit_code = 1
    hint = ""


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
    """`param`: the field of the request that it is about, where it is one. `code`: OpenAI's word for what is wrong."""

    exit_code = 4

    def __init__(
        self, message: str = "", param: str | None = None, code: str | None = None, hint: str | None = None
    ) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
        self.hint = type(self).hint if hint is None else hint


class TooLongError(RequestError):
    hint = "--max-model-len"
    num_prompt_tokens = 0  # at least
    limit = 0  # of the context


class EngineError(QuireError):
    exit_code = 5


class WorkerDied(EngineError):
    """`signal`: the one that killed it; None: it ended by itself."""

    def __init__(self, message: str, signal: int | None = None) -> None:
        super().__init__(message)
        self.signal = signal


class OverloadedError(QuireError):
    """`retry_after_s`: when to come back."""

    def __init__(self, message: str, retry_after_s: float = 1.0, hint: str = "") -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.hint = hint


class ClusterError(OverloadedError):
    """A server that has run before tries again until they are."""

    def __init__(self, message: str, retry_after_s: float = 5.0, hint: str = "") -> None:
        super().__init__(message, retry_after_s, hint)


class RateLimitedError(QuireError):
    """`retry_after_s`: when the request would be within the limit."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineError(QuireError):
    pass


class InternalError(EngineError):
    pass


class PoisonError(EngineError):
    pass
