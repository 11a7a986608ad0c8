"""Which certificate a process uses, and whether it says who the process is."""

from __future__ import annotations

import datetime
from pathlib import Path

from cryptography import x509

from contracts.errors import ConfigError
from contracts.identity import Identity, identity_of
from runtime.config import Config
from storelink import credentials
from storelink.credentials import CERTIFICATE

_REMEDY = "`upbeat certs --help` says how to make or renew it"


def use_certificate(config: Config, who: Identity) -> None:
    """From now on this process shows the certificate of `who`, as `tls.directory` says. Raises ConfigError."""
    if config.tls.directory is None:
        return
    directory = place_of(config.tls.directory, who)
    try:
        credentials.use(directory)
        check_certificate(directory / CERTIFICATE, who)
    except OSError as e:
        raise ConfigError(f"tls.directory = {str(directory)!r}: no certificate of {who}: {e}; {_REMEDY}") from e


def place_of(directory: Path, who: Identity) -> Path:
    """The directory of `who`'s files: `directory` itself where it holds a certificate, else the one named as `who`."""
    return directory if (directory / CERTIFICATE).exists() else directory / str(who)


def check_certificate(file: Path, who: Identity) -> None:
    """Raises ConfigError for another's certificate, or one that has expired; OSError for one that cannot be read."""
    found = x509.load_pem_x509_certificate(file.read_bytes())  # ssl has read it already
    said = identity_in(file)
    if said != who:
        whose = "no process of a fleet" if said is None else str(said)
        raise ConfigError(f"{file} is the certificate of {whose}, and this is {who}; give its own (DNS name {who.dns})")
    if found.not_valid_after_utc <= datetime.datetime.now(datetime.UTC):
        raise ConfigError(f"{file} expired at {found.not_valid_after_utc:%Y-%m-%d %H:%M} UTC; {_REMEDY}")


def identity_in(file: Path) -> Identity | None:
    """Whose certificate it is; None: of no process of a fleet. Raises OSError."""
    try:
        found = x509.load_pem_x509_certificate(file.read_bytes())
        names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (ValueError, x509.ExtensionNotFound):
        return None
    return identity_of(names.get_values_for_type(x509.DNSName))
