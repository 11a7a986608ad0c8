"""Whom a hint comes from, as the scheduler may know it: a digest of the client's address, so that trust goes by address and no address
leaves the gateway.

The key comes from the configured API keys, which all gateways of a deployment share and nobody else has. The address is the peer's: behind
a proxy all its clients are one caller, as nothing tells a header that the proxy wrote from one that a client made up.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from functools import lru_cache

from blake3 import blake3

from contracts.api_keys import configured_digest

_CONTEXT = "upbeat gateway: callers' addresses, version 1"
_DIGEST_BYTES = 8
_REMEMBERED = 4096


def network_of(address: str | None) -> str:
    """Whom an address belongs to, in one spelling: itself, or its IPv6 network of 64 bits, whose clients take addresses from it as they
    like. Empty when it is not known."""
    if not address:
        return ""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return ""
    if isinstance(parsed, ipaddress.IPv6Address):
        known = parsed.ipv4_mapped.packed if parsed.ipv4_mapped is not None else parsed.packed[:8]
    else:
        known = parsed.packed
    return known.hex()


class Callers:
    """Immutable."""

    def __init__(self, secrets: Iterable[str]) -> None:
        """secrets: the API keys as configured, in full or hashed, in any order."""
        joined = b"\0".join(sorted(configured_digest(s) for s in secrets))
        self._key = blake3(joined, derive_key_context=_CONTEXT).digest()
        #: The digest of an address, remembered for the latest ones: a page hints again and again.
        self.digest = lru_cache(_REMEMBERED)(self._digest)

    def _digest(self, address: str | None) -> str:
        """16 hexadecimal digits for a peer's network; empty when it is not known."""
        network = network_of(address)
        return blake3(bytes.fromhex(network), key=self._key).hexdigest(length=_DIGEST_BYTES) if network else ""
