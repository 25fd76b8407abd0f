"""Client: sends messages to a core and gives a request what the core answers, in one process or over a socket.

Used by `LLM` and by the supervisor, which know the live requests and decide what follows. Knows messages and requests,
not who waits for them.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable

from quire.errors import InternalError, QuireError, RequestError
from quire.frontend.requests import RequestState
from quire.messages import AddRequest, ChoiceDelta, Sleep, ToCore, Vocabulary


class Client(ABC):
    knows_vocabulary = False

    @abstractmethod
    def send(self, message: ToCore) -> None:
        """Does not wait for an answer."""

    def prepare(self, message: AddRequest, vocabulary: Callable[[], Vocabulary]) -> None:
        """Call before a request is sent: a core must know what tokens spell before its first constraint comes."""
        if message.constraint is not None and not self.knows_vocabulary:
            self.send(vocabulary())
            self.knows_vocabulary = True

    def apply_delta(self, request: RequestState, delta: ChoiceDelta) -> QuireError | None:
        """Gives a request what the core computed for it; returns why the core gave the request up, if it did."""
        if delta.finish_reason == "error":
            return _given_up(delta)
        abort = request.add_delta(delta)
        if abort is not None:  # a stop string ended the choice, which the core cannot see
            self.send(abort)
        return None


def _given_up(delta: ChoiceDelta) -> QuireError:
    return RequestError(delta.error) if delta.error else InternalError("the engine could not take this request in")


def sleep_at(level: int) -> Sleep:
    """The question that a level of sleep stands for, as vLLM counts them."""
    if level not in (1, 2):
        raise RequestError("level must be 1 (weights are kept in the host's memory) or 2 (they are forgotten)", "level")
    return Sleep(keep_weights=level == 1)
