"""Client: sends messages to a core and gives each request what the core answers, in one process or over a socket.

Used by `LLM` and by the supervisor, which decide what follows from a change. Knows messages and requests, not who waits
for them.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import NamedTuple

from quire.errors import InternalError, QuireError, RequestError
from quire.frontend.requests import RequestState
from quire.messages import AddRequest, ChoiceDelta, StepOutputs, ToCore, Vocabulary


class Change(NamedTuple):
    """What a delta of the core changed in a request; with an error, the request has not taken the delta in."""

    request: RequestState
    num_tokens: int  # that came with it
    is_first: bool  # these are the request's first tokens
    error: Exception | None  # why it cannot go on: a QuireError if the core gave it up, else what was raised here


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

    def apply_outputs(self, outputs: StepOutputs, find: Callable[[str], RequestState | None]) -> Iterator[Change]:
        """What a step's outputs change, request by request; `find` gives a live request by its id.

        Whatever goes wrong with one request is its change's error: the others' changes come nevertheless.
        """
        for delta in outputs.deltas:  # one call or object less here is one less for every token
            request = find(delta.request_id)
            if request is None:
                continue  # it ended here before the core knew
            num_tokens = len(delta.token_ids)
            is_first = num_tokens > 0 and request.metrics.first_token_time is None
            error: Exception | None = None
            if delta.finish_reason == "error":
                error = _given_up(delta)
            else:
                try:
                    abort = request.add_delta(delta)
                    if abort is not None:  # a stop string ended the choice, which the core cannot see
                        self.send(abort)
                except Exception as raised:
                    error = raised
            yield Change(request, num_tokens, is_first, error)


def _given_up(delta: ChoiceDelta) -> QuireError:
    return RequestError(delta.error) if delta.error else InternalError("the engine could not take this request in")
