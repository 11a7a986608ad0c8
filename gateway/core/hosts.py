"""Decides which Host names and which page origins this server accepts.

With DNS rebinding, a web page reaches this server under the page's host name, and its browser lets it read the answers.
The browser sends that name in `Host`, so foreign names are refused.

Without keys every caller may do everything, so only loopback and configured names, and pages loaded from them, are
accepted. With keys, every name is accepted unless the operator lists some.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection
from functools import lru_cache

#: A Host header (RFC 9110, 7.2): a name, an IPv4 address or an IPv6 address in brackets, and an optional port.
_AUTHORITY = re.compile(r"([A-Za-z0-9._-]{1,255}|\[[0-9A-Fa-f:.]{2,45}\])(?::[0-9]{0,5})?")
_ORIGIN = re.compile(r"https?://(.+)")
_UNSPECIFIED = {"0.0.0.0", "::", ""}
_REMEMBERED = 256


def canonical(host: str) -> str:
    """A name or an address (IPv6 with or without brackets) in canonical form: lower case, no trailing dot, shortest
    address, `loopback` for any loopback address."""
    host = host.lower().removesuffix(".")
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return "loopback" if address.is_loopback else str(address)


class Hosts:
    """The accepted names and origins. Immutable."""

    def __init__(
        self, listens_on: str, configured: Collection[str], origins: Collection[str], *, has_keys: bool
    ) -> None:
        """listens_on: `gateway.host`. configured: `gateway.hosts`; `*.example.org` stands for every name below it.
        origins: `gateway.cors_origins`. has_keys: callers need one."""
        own = [] if listens_on in _UNSPECIFIED else [listens_on]
        names = {canonical(name) for name in [*own, *configured]}
        self._names = {name for name in names if not name.startswith("*.")} | {"localhost", "loopback"}
        self._below = tuple(name[1:] for name in names if name.startswith("*."))
        self._origins = frozenset(origins)
        #: Whether names, and pages, are checked.
        self.checks_names = bool(configured) or not has_keys
        self.checks_pages = not has_keys
        #: Cached, because every request asks for both, mostly with the same arguments.
        self.knows = lru_cache(_REMEMBERED)(self._knows)
        self.trusts = lru_cache(_REMEMBERED)(self._trusts)

    def _knows(self, authority: str) -> bool:
        """Whether a Host header names this server. Any port is accepted, because a proxy may listen on another."""
        matched = _AUTHORITY.fullmatch(authority)
        if matched is None:
            return False
        name = canonical(matched[1])
        return name in self._names or (bool(self._below) and name.endswith(self._below))

    def _trusts(self, origin: str | None, site: str | None) -> bool:
        """Whether the page that sent a request is accepted. origin: the Origin header, which browsers add to what pages
        send. site: Sec-Fetch-Site, which browsers add to every request to loopback. Other programs send neither."""
        if origin is None:
            return site != "cross-site"
        if "*" in self._origins or origin in self._origins:
            return True
        matched = _ORIGIN.fullmatch(origin)
        return matched is not None and self._knows(matched[1])
