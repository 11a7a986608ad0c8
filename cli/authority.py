"""A fleet's own certificate authority: its key, and the certificates that it signs.

DIRECTORY/ca/ca.crt, ca.key     the authority; its key is needed to sign only
DIRECTORY/NAME/tls.crt, tls.key, ca.crt    one identity: gateway, scheduler, operator, node-0, node-1, ...
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from contracts.errors import ConfigError
from contracts.identity import GATEWAY, OPERATOR, SCHEDULER, Identity, identity_of, node
from storelink.credentials import AUTHORITY, CERTIFICATE, KEY

_AUTHORITY_DAYS = 3650
#: Certificates with less than this part of their days left are renewed.
RENEW_BELOW = 1 / 3
#: A certificate is valid from a little earlier on, for clocks that differ.
_EARLIER = datetime.timedelta(hours=1)


@dataclass(frozen=True, slots=True)
class Issued:
    """A certificate of the directory, and until when it is valid (UTC)."""

    who: Identity
    directory: Path
    until: datetime.datetime


class Authority:
    """The authority in `directory`, which is made if it is missing. Raises ConfigError for files that cannot be read or
    written."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._file, self._key_file = directory / "ca" / AUTHORITY, directory / "ca" / "ca.key"
        try:
            if self._file.exists() != self._key_file.exists():
                missing = self._key_file if self._file.exists() else self._file
                raise ConfigError(f"{missing} is missing; put it back, or give another directory for a new authority")
            if not self._file.exists():
                self._make()
            self._certificate = x509.load_pem_x509_certificate(self._file.read_bytes())
            key = serialization.load_pem_private_key(self._key_file.read_bytes(), None)
        except (OSError, ValueError) as e:
            raise ConfigError(f"{directory}: {e}") from e
        assert isinstance(key, ec.EllipticCurvePrivateKey), "as _make makes it"
        self._key = key

    def _make(self) -> None:
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Upbeat fleet")])
        usage = _usage(signs=True)
        made = _builder(name, name, key, _AUTHORITY_DAYS)
        made = made.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        made = made.add_extension(usage, critical=True)
        _write(self._key_file, _pem(key))
        _write(self._file, made.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))

    def issue(self, who: Identity, days: float) -> Issued:
        """A new key and certificate of `who`, in place of former ones. Raises ConfigError."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, str(who))])
        made = _builder(name, self._certificate.subject, key, days)
        both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        for extension, critical in (
            (x509.SubjectAlternativeName([x509.DNSName(who.dns)]), False),
            (x509.BasicConstraints(ca=False, path_length=None), True),
            (_usage(signs=False), True),
            (x509.ExtendedKeyUsage(both), False),
            (issuer, False),
        ):
            made = made.add_extension(extension, critical=critical)
        signed = made.sign(self._key, hashes.SHA256())
        place = self.directory / str(who)
        try:
            _write(place / AUTHORITY, self._file.read_bytes())
            _write(place / KEY, _pem(key))
            _write(place / CERTIFICATE, signed.public_bytes(serialization.Encoding.PEM))
        except OSError as e:
            raise ConfigError(f"{place}: {e}") from e
        return Issued(who, place, signed.not_valid_after_utc)

    def complete(self, wanted: Iterable[Identity], days: float) -> list[Issued]:
        """Issues what is missing of `wanted`, and what is there with less than a third of `days` left. Raises
        ConfigError."""
        soon = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days * RENEW_BELOW)
        lasting = {one.who for one in self.issued() if one.until >= soon}
        return [self.issue(who, days) for who in wanted if who not in lasting]

    def issued(self) -> list[Issued]:
        """Every certificate in the directory, by name."""
        found = []
        for file in sorted(self.directory.glob(f"*/{CERTIFICATE}")):
            try:
                certificate = x509.load_pem_x509_certificate(file.read_bytes())
                names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
            except (OSError, ValueError, x509.ExtensionNotFound) as e:
                raise ConfigError(f"{file}: {e}; remove it, and make it again") from e
            if (who := identity_of(names.get_values_for_type(x509.DNSName))) is not None:
                found.append(Issued(who, file.parent, certificate.not_valid_after_utc))
        return found


def everybody(nodes: int) -> list[Identity]:
    """The identities of a fleet of so many nodes."""
    return [GATEWAY, SCHEDULER, OPERATOR, *(node(f"node-{n}") for n in range(nodes))]


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: float
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _EARLIER)
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write(file: Path, content: bytes) -> None:
    """Replaces it in one step; only its owner can read it."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    new = file.with_suffix(f"{file.suffix}.new")
    new.unlink(missing_ok=True)
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as f:
        f.write(content)
        f.flush()
        os.fsync(f.fileno())
    new.replace(file)
