"""Certificates for the stacks of one machine: made without being asked, so that its other users cannot reach the
internal ports."""

from __future__ import annotations

from collections.abc import Iterable

from contracts.identity import OPERATOR, Identity, node
from runtime.config import Config
from runtime.config_file import changed

#: A stack takes new ones only when it starts.
_DAYS = 1095.0


def with_own_certificates(config: Config, wanted: Iterable[Identity] | None = None) -> Config:
    """`config` with certificates of `wanted` (default: of a whole stack) in DATA/tls, if it names none. Makes what is
    missing there, and renews what has less than a third of its time left. Raises ConfigError."""
    if config.tls.directory is not None or not config.tls.automatic:
        return config
    from cli.authority import Authority, everybody  # cryptography takes a moment to import

    authority = Authority(config.own_certificates)
    authority.complete(everybody(config.nodes.count) if wanted is None else wanted, _DAYS)
    return changed(config, {"tls": {"directory": config.own_certificates}})


def joined_certificates(config: Config, number: int) -> Config:
    """`config` for a node that joins the fleet whose data directory this is: with a certificate from its DATA/tls, if
    the fleet has made one. Raises ConfigError."""
    if not config.own_certificates.exists():
        return config
    return with_own_certificates(config, [OPERATOR, node(f"node-{number}")])
