"""The gateway's own certificate: what HTTPS clients are shown, and new files without a restart."""

from __future__ import annotations

import contextlib
import ssl
import time
from pathlib import Path

from contracts.errors import ConfigError
from storelink.credentials import CERTIFICATE, KEY

#: The files are looked at no more often than this.
_LOOK_S = 1.0


def https_context(directory: Path) -> ssl.SSLContext:
    """TLS 1.2 or newer with `tls.crt` and `tls.key` of `directory`, which are read again before a handshake once they
    have changed. While they do not fit each other, the former ones stay in use. Raises ConfigError."""
    certificate, key = directory / CERTIFICATE, directory / KEY
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.minimum_version = ssl.TLSVersion.TLSv1_2
    made.set_alpn_protocols(["http/1.1"])

    def stamps() -> list[tuple[int, int, int]]:
        return [(s.st_ino, s.st_mtime_ns, s.st_size) for s in (certificate.stat(), key.stat())]

    def load() -> None:
        # Into another context first: one that failed halfway would have a certificate without its key.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
        made.load_cert_chain(certificate, key)

    try:
        loaded, looked_s = stamps(), time.monotonic()
        load()
    except OSError as e:
        raise ConfigError(
            f"gateway.https = {str(directory)!r}: {e}; give a directory with {CERTIFICATE} (the whole chain) and {KEY}"
        ) from e

    def look(*_: object) -> None:
        nonlocal loaded, looked_s
        if (now_s := time.monotonic()) - looked_s < _LOOK_S:
            return
        looked_s = now_s
        with contextlib.suppress(OSError):
            if (found := stamps()) != loaded:
                load()
                loaded = found

    made.sni_callback = look
    return made
