"""Which host names are this server's own, and which web pages count as its neighbours.

A web page that was told a wrong address for its own name (DNS rebinding) reaches this server under that name, and its browser lets it read
the answers. It cannot make the browser send another `Host` than the name it was loaded from, so a name that is not ours is refused.

Without keys, whoever reaches the server may do everything. Then only loopback's names, the configured ones, and pages that were
loaded from them, are served. With keys, no page has one that it was not given: every name is fine unless the operator lists some.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection
from functools import lru_cache

#: What a Host header may be (RFC 9110, 7.2): a name, an IPv4 address or an IPv6 address in brackets, and a port.
_AUTHORITY = re.compile(r"([A-Za-z0-9._-]{1,255}|\[[0-9A-Fa-f:.]{2,45}\])(?::[0-9]{0,5})?")
_ORIGIN = re.compile(r"https?://(.+)")
_UNSPECIFIED = {"0.0.0.0", "::", ""}
_REMEMBERED = 256


def canonical(host: str) -> str:
    """A name or an address (IPv6 with or without brackets) in the one spelling that is compared: lower case, without the dot that
    may end a name, addresses in their shortest form."""
    host = host.lower().removesuffix(".")
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return "loopback" if address.is_loopback else str(address)


class Hosts:
    """Immutable."""

    def __init__(self, listens_on: str, configured: Collection[str], origins: Collection[str], *, has_keys: bool) -> None:
        """listens_on: `gateway.host`. configured: `gateway.hosts`; `*.example.org` stands for every name below it. origins:
        `gateway.cors_origins`. has_keys: callers need one."""
        own = [] if listens_on in _UNSPECIFIED else [listens_on]
        names = {canonical(name) for name in [*own, *configured]}
        self._names = {name for name in names if not name.startswith("*.")} | {"localhost", "loopback"}
        self._below = tuple(name[1:] for name in names if name.startswith("*."))
        self._origins = frozenset(origins)
        #: Whether names, and pages, are looked at.
        self.checks_names = bool(configured) or not has_keys
        self.checks_pages = not has_keys
        #: Both are asked at each request and mostly the same.
        self.knows = lru_cache(_REMEMBERED)(self._knows)
        self.trusts = lru_cache(_REMEMBERED)(self._trusts)

    def _knows(self, authority: str) -> bool:
        """Whether a Host header, with or without a port, is one of ours. Any port: what stands in front may have another."""
        matched = _AUTHORITY.fullmatch(authority)
        if matched is None:
            return False
        name = canonical(matched[1])
        return name in self._names or (bool(self._below) and name.endswith(self._below))

    def _trusts(self, origin: str | None, site: str | None) -> bool:
        """Whether a request may come from where its headers say. origin: the Origin header, which browsers add to what pages send;
        site: Sec-Fetch-Site, which browsers add to everything that they ask for at loopback. No program but a browser sends either."""
        if origin is None:
            return site != "cross-site"
        if "*" in self._origins or origin in self._origins:
            return True
        matched = _ORIGIN.fullmatch(origin)
        return matched is not None and self._knows(matched[1])
