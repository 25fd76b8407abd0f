"""The server's certificate: loaded at the start, and again when its files change.

Made by `run.py`, which has it refreshed every second. Connections under way keep what they began with.
"""

import asyncio
import errno
import ssl
from pathlib import Path

from quire.api.server import logs
from quire.api.server.watched import WatchedFiles
from quire.config.server import ServerConfig
from quire.errors import ConfigError

MAX_CERTIFICATE_BYTES = 1 << 20


class Certificates:
    def __init__(self, config: ServerConfig) -> None:
        """ConfigError: the files cannot be used."""
        self.config = config
        files = [config.ssl_certfile, config.ssl_keyfile]
        self.files = WatchedFiles([Path(file) for file in files if file], MAX_CERTIFICATE_BYTES)
        self.files.changed()
        self.context = self._load()  # what the server was started with; it checks clients' certificates
        self.current = self.context  # has the newest certificate
        if config.enable_ssl_refresh:
            self.context.sni_callback = self._choose

    async def refresh(self) -> None:
        """Called every second: takes new files. Those that cannot be used change nothing."""
        found: ssl.SSLContext | ConfigError | None = None
        while await asyncio.to_thread(self.files.changed) is not None:  # once more if written while they were loaded
            try:
                found = await asyncio.to_thread(self._load)
            except ConfigError as error:
                found = error
        if isinstance(found, ConfigError):
            logs.log.error("%s; until they can, the certificate is the one from before", found)
        elif found is not None:
            self.current = found
            logs.log.info("the certificate was read again")

    def _choose(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        """Called at the beginning of each handshake, also of clients that name no server."""
        connection.context = self.current

    def _load(self) -> ssl.SSLContext:
        config = self.config
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            # Asked for the passphrase of a key, Python would wait for somebody at the terminal.
            context.load_cert_chain(config.ssl_certfile or "", config.ssl_keyfile, password=lambda: "")
        except OSError as error:
            reason = _reason(error, "they are no certificate and key that fit, or the key needs a passphrase")
            raise ConfigError(f"--ssl-certfile and --ssl-keyfile cannot be used: {reason}") from None
        context.verify_mode = ssl.VerifyMode(config.ssl_cert_reqs)
        if config.ssl_ca_certs:
            try:
                context.load_verify_locations(config.ssl_ca_certs)
            except OSError as error:
                reason = _reason(error, "it holds no certificates")
                raise ConfigError(f"--ssl-ca-certs cannot be used: {reason}") from None
        return context


def _reason(error: OSError, otherwise: str) -> str:
    is_missing = error.filename or error.errno == errno.ENOENT
    return error.strerror if is_missing and error.strerror else otherwise
