"""Which of several servers a session belongs to: rendezvous hashing (Thaler and Ravishankar, 1996).

Each pair of session and address has a weight. The session belongs to the address with the greatest weight, and to the
next ones while that does not answer. The order is the same for everyone who knows the addresses. When an address
leaves, only its sessions move, evenly to the others.
"""

from __future__ import annotations

from collections.abc import Iterable

from blake3 import blake3

from contracts.ids import SessionKey


def rendezvous(session: SessionKey, addresses: Iterable[str]) -> list[str]:
    """The addresses in order of preference for the session."""
    seed = f"{session}\0".encode()
    return sorted(addresses, key=lambda address: (blake3(seed + address.encode()).digest(8), address), reverse=True)
