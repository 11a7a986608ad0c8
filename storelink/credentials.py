"""A process's certificate: TLS both ways on every internal channel, and new files without a restart.

A directory holds `tls.crt`, `tls.key` and `ca.crt`, as a Kubernetes TLS secret does. Files are looked at again before
a connection is made. While they do not fit each other, because some are being replaced, the former ones stay in use.
"""

from __future__ import annotations

import contextlib
import ssl
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import grpc

CERTIFICATE, KEY, AUTHORITY = "tls.crt", "tls.key", "ca.crt"
#: The files are looked at no more often than this.
_LOOK_S = 1.0
Clock = Callable[[], float]


class Pem(NamedTuple):
    """The files' bytes."""

    certificate: bytes
    key: bytes
    authority: bytes


class Credentials:
    """The certificate in `directory`. Thread-safe. Raises OSError if the files are missing or do not fit each other."""

    def __init__(self, directory: Path, now: Clock = time.monotonic) -> None:
        self.directory, self._now = directory, now
        self._lock = threading.Lock()
        self._looked_s = now()
        self._stamp = self._stamps()
        self._pem = self._read()
        #: Rises when the files have changed.
        self.generation = 0
        self._served = -1
        self._connecting: tuple[ssl.SSLContext, int] | None = None

    # ---- what gRPC takes ---------------------------------------------------------------------------------------
    def server(self, begun: Callable[[], None] = lambda: None) -> grpc.ServerCredentials:
        """Asks each client for a certificate. begun: called at the start of each handshake, from any thread."""

        def newer() -> Any:
            begun()
            return self._newer()

        return grpc.dynamic_ssl_server_credentials(self._configuration(), newer, require_client_authentication=True)

    def client(self) -> grpc.ChannelCredentials:
        """Of the newest files."""
        pem = self.newest()
        return grpc.ssl_channel_credentials(pem.authority, pem.key, pem.certificate)

    def _configuration(self) -> Any:
        pem = self.newest()
        return grpc.ssl_server_certificate_configuration([(pem.key, pem.certificate)], root_certificates=pem.authority)

    def _newer(self) -> Any:
        """For each handshake: None where nothing has changed."""
        self.newest()
        if self._served == self.generation:
            return None
        self._served = self.generation
        return self._configuration()

    # ---- what sockets take -------------------------------------------------------------------------------------
    def server_context(self) -> ssl.SSLContext:
        """For sockets that listen. It takes new files by itself, but goes on trusting former authorities. Raises
        OSError."""
        context = self._context(ssl.PROTOCOL_TLS_SERVER)
        loaded = self.generation

        def look(*_: object) -> None:
            nonlocal loaded
            self.newest()
            if loaded != (newest := self.generation):
                with contextlib.suppress(OSError):
                    self._load(context)
                    loaded = newest

        context.sni_callback = look  # before each handshake
        return context

    def client_context(self, *, any_name: bool = False) -> ssl.SSLContext:
        """For sockets that connect. any_name: to whomever the authority has signed. Raises OSError."""
        self.newest()
        if any_name:
            unnamed = self._context(ssl.PROTOCOL_TLS_CLIENT)
            unnamed.check_hostname = False
            return unnamed
        made, generation = self._connecting or (None, -1)
        if made is None or generation != self.generation:
            made = self._context(ssl.PROTOCOL_TLS_CLIENT)
            self._connecting = made, self.generation
        return made

    def _context(self, protocol: int) -> ssl.SSLContext:
        """TLS 1.3, and the other side must have a certificate of this authority."""
        made = ssl.SSLContext(protocol)
        made.minimum_version = ssl.TLSVersion.TLSv1_3
        made.verify_mode = ssl.CERT_REQUIRED
        self._load(made)
        return made

    def _load(self, context: ssl.SSLContext) -> None:
        context.load_cert_chain(self.directory / CERTIFICATE, self.directory / KEY)
        context.load_verify_locations(self.directory / AUTHORITY)

    # ---- files -------------------------------------------------------------------------------------------------
    def newest(self) -> Pem:
        """What the files hold now, or held when they last fitted each other."""
        with self._lock:
            if self._now() - self._looked_s >= _LOOK_S:
                self._looked_s = self._now()
                try:
                    if (stamp := self._stamps()) != self._stamp:
                        self._pem = self._read()
                        self._stamp = stamp
                        self.generation += 1
                except OSError:  # some are being replaced, or were taken away
                    pass
            return self._pem

    def _stamps(self) -> list[tuple[int, int, int]]:
        found = [(self.directory / name).stat() for name in (CERTIFICATE, KEY, AUTHORITY)]
        return [(s.st_ino, s.st_mtime_ns, s.st_size) for s in found]

    def _read(self) -> Pem:
        before = self._stamps()
        self._load(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))  # ssl.SSLError, for files that do not fit, is an OSError
        pem = Pem(*((self.directory / name).read_bytes() for name in (CERTIFICATE, KEY, AUTHORITY)))
        if self._stamps() != before:
            raise OSError("the files are being replaced")
        return pem


_own: Credentials | None = None


def use(directory: Path | None) -> None:
    """From now on this process's channels and servers use the certificate in `directory`; None: they use none. Raises
    OSError."""
    global _own
    _own = None if directory is None else Credentials(directory)


def own() -> Credentials | None:
    """This process's, if it has one."""
    return _own
