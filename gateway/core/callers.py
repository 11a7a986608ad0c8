"""Digests of client addresses: schedulers trust hints per digest, so no address leaves the gateway.

The digest's key is derived from the configured API keys, which all gateways of a deployment share. The address is the
peer's: all clients of a proxy count as one caller, because its headers cannot be told from forged ones.
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
    """The owner of an address in canonical form: an IPv4 address, or the /64 network of an IPv6 address, whose client
    can choose any address in it. Empty when unknown."""
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
    """Computes the digests. Immutable."""

    def __init__(self, secrets: Iterable[str]) -> None:
        """secrets: the API keys as configured, in full or hashed, in any order."""
        joined = b"\0".join(sorted(configured_digest(s) for s in secrets))
        self._key = blake3(joined, derive_key_context=_CONTEXT).digest()
        #: The digest of an address, cached because pages send hints repeatedly.
        self.digest = lru_cache(_REMEMBERED)(self._digest)

    def _digest(self, address: str | None) -> str:
        """16 hexadecimal digits for a peer's network; empty when unknown."""
        network = network_of(address)
        return blake3(bytes.fromhex(network), key=self._key).hexdigest(length=_DIGEST_BYTES) if network else ""
