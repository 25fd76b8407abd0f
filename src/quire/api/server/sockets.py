"""Where the server listens: a port, or a Unix socket that is for this user alone.

Called by `run.py`, first of all, so that what is in use is reported at once. Knows no HTTP.
"""

import contextlib
import errno
import os
import socket
import stat
from collections.abc import Iterator

from quire.errors import ConfigError

BACKLOG = 2048
PROBE_S = 1.0


def listen(host: str, port: int, flag: str = "--port") -> socket.socket:
    """The open port; ConfigError says why it cannot be had. `flag`: what chose it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            reason = f"port {port} of {host} is in use: stop what listens there, or choose another with {flag}"
        elif error.errno == errno.EACCES:
            reason = f"port {port} needs more rights than this user has: choose one above 1023 with {flag}"
        else:
            reason = f"cannot listen on {host}: it is no address of this machine"
        raise ConfigError(reason) from None


@contextlib.contextmanager
def listen_unix(path: str) -> Iterator[socket.socket]:
    """The open socket, which is removed at the end; ConfigError says why it cannot be had."""
    if "\0" in path:  # Linux has sockets that are no files, which anybody may connect to
        raise ConfigError("--uds holds a null character: give the path of a file")
    _remove_stale(path)
    with socket.socket(socket.AF_UNIX) as sock:
        mask = os.umask(0o177)  # only this user may connect, from the first moment on
        try:
            sock.bind(path)
        except OSError as error:
            why = error.strerror or "the path is too long"
            raise ConfigError(f"cannot listen on --uds {path!r:.200}: {why}") from None
        finally:
            os.umask(mask)
        made = os.lstat(path).st_ino
        sock.listen(BACKLOG)
        try:
            yield sock
        finally:
            with contextlib.suppress(OSError):
                if os.lstat(path).st_ino == made:  # another server may have made its own since
                    os.unlink(path)


def _remove_stale(path: str) -> None:
    """Removes a socket that a server left behind which did not end by itself, and nothing else."""
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return  # nothing there; whatever else is wrong, binding will tell
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"--uds {path!r:.200} is there already and no socket: choose another path")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(PROBE_S)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
        except OSError:
            pass
    raise ConfigError(f"--uds {path!r:.200} is in use: stop what listens there, or choose another path")
