"""URLs of a gateway: for this machine, and for others if it listens on every address."""

from __future__ import annotations

import ipaddress
import socket
import ssl
from collections.abc import Iterable

import psutil

from runtime.config import Config

#: Wildcard hosts: the loopback address to use for each, and the IP versions that each covers.
_EVERY = {"0.0.0.0": "127.0.0.1", "::": "::1"}
_FAMILIES = {"0.0.0.0": (4,), "::": (4, 6)}


def base_url(config: Config) -> str:
    """The gateway's URL for this machine."""
    return _url(config, _EVERY.get(config.gateway.host, config.gateway.host))


def unverified(config: Config) -> ssl.SSLContext | None:
    """For questions without secrets to this machine's own gateway, whose certificate names another host; None: it
    speaks plain HTTP."""
    if config.gateway.https is None:
        return None
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    made.check_hostname = False
    made.verify_mode = ssl.CERT_NONE
    return made


def other_urls(config: Config, own: Iterable[str] | None = None) -> list[str]:
    """The gateway's URLs for other machines; empty unless it listens on every address.

    own: this machine's addresses; default: those of its interfaces that are up.
    """
    wanted = _FAMILIES.get(config.gateway.host, ())
    found = [ipaddress.ip_address(address) for address in (_own() if own is None else own)] if wanted else []
    return [_url(config, str(a)) for a in found if a.version in wanted and not (a.is_loopback or a.is_link_local)]


def _own() -> list[str]:
    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    each = (address for name, addresses in psutil.net_if_addrs().items() if name in up for address in addresses)
    return [
        address.address.partition("%")[0] for address in each if address.family in (socket.AF_INET, socket.AF_INET6)
    ]


def _url(config: Config, host: str) -> str:
    return f"{config.gateway.scheme}://{f'[{host}]' if ':' in host else host}:{config.gateway.port}"
