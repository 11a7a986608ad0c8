"""Which of several servers a session belongs to: rendezvous hashing (Thaler and Ravishankar, 1996).

Each pair of a session and an address has a weight; the session belongs to the address with the greatest one, and to the next
ones in order while that does not answer. Whoever knows the addresses comes to the same order, whatever order he knows them in; an
address that leaves gives its sessions to all others evenly, and no other session moves.
"""

from __future__ import annotations

from collections.abc import Iterable

from blake3 import blake3

from contracts.ids import SessionKey


def rendezvous(session: SessionKey, addresses: Iterable[str]) -> list[str]:
    """The addresses, the one that the session belongs to first."""
    seed = f"{session}\0".encode()
    return sorted(addresses, key=lambda address: (blake3(seed + address.encode()).digest(8), address), reverse=True)
