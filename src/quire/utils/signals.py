"""Lets Ctrl-C interrupt between two steps, never inside one: the engine stays whole and can be used again."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def interrupts_deferred() -> Iterator[Callable[[], None]]:
    """Gives a function that raises KeyboardInterrupt if Ctrl-C was pressed since; a second Ctrl-C raises at once."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    was_interrupted = False

    def remember(signum: int, frame: object) -> None:
        nonlocal was_interrupted
        if was_interrupted:
            raise KeyboardInterrupt
        was_interrupted = True

    def check() -> None:
        if was_interrupted:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, remember)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, before)
