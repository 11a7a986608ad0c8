"""Which certificate a process uses, and whether it says who the process is."""

from __future__ import annotations

import datetime
from pathlib import Path

from cryptography import x509
from prometheus_client import Gauge

from contracts.errors import ConfigError
from contracts.identity import Identity, identity_of
from runtime import telemetry
from runtime.config import Config
from storelink import credentials
from storelink.credentials import CERTIFICATE

_EXPIRES = Gauge(
    "upbeat_certificate_expires_timestamp_seconds",
    "When this process's certificate expires, in seconds since 1970; 0: it has none that can be read",
    registry=telemetry.REGISTRY,
)
_REMEDY = "`upbeat certs --help` says how to make or renew it"


def use_certificate(config: Config, who: Identity) -> None:
    """From now on this process shows the certificate of `who`, as `tls.directory` says. Raises ConfigError."""
    if config.tls.directory is None:
        return
    file = place_of(config.tls.directory, who) / CERTIFICATE
    checked(file, who)
    try:
        credentials.use(file.parent)
    except OSError as e:
        raise ConfigError(f"{file.parent}: its files do not fit each other: {e}; {_REMEDY}") from e
    _EXPIRES.set_function(lambda: _expires(file))


def place_of(directory: Path, who: Identity) -> Path:
    """The directory of `who`'s files: `directory` itself where it holds a certificate, else the one named as `who`."""
    return directory if (directory / CERTIFICATE).exists() else directory / str(who)


def checked(file: Path, who: Identity) -> datetime.datetime:
    """Until when it is valid. Raises ConfigError for one that cannot be read, is another's, or has expired."""
    try:
        said, until = _identity(file), _until(file)
    except (OSError, ValueError) as e:
        raise ConfigError(f"no certificate of {who} in tls.directory: {file}: {e}; {_REMEDY}") from e
    if said != who:
        whose = "no process of a fleet" if said is None else str(said)
        raise ConfigError(f"{file} is the certificate of {whose}, and this is {who}; give its own (DNS name {who.dns})")
    if until <= datetime.datetime.now(datetime.UTC):
        raise ConfigError(f"{file} expired at {until:%Y-%m-%d %H:%M} UTC; {_REMEDY}")
    return until


def _identity(file: Path) -> Identity | None:
    found = x509.load_pem_x509_certificate(file.read_bytes())
    try:
        names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return None
    return identity_of(names.get_values_for_type(x509.DNSName))


def _expires(file: Path) -> float:
    """For the metrics, which must not fail because a file was taken away."""
    try:
        return _until(file).timestamp()
    except (OSError, ValueError):
        return 0.0


def _until(file: Path) -> datetime.datetime:
    return x509.load_pem_x509_certificate(file.read_bytes()).not_valid_after_utc
