"""The receivers of the store's answers: attached workers, and peers that read this node."""

from __future__ import annotations

from typing import Protocol

from contracts.v1 import common_pb2
from kvstore.core import instructions as do


class Owner(Protocol):
    """The receiver of a load's or save's answers."""

    def answer(self, instruction: do.Found | do.Pieces | do.End | do.Grant) -> None:
        """Forward the answer; never blocks."""
        ...


class Attached(Owner, Protocol):
    """A worker: its device's number on the node, and the models that it serves."""

    device: int
    fingerprints: frozenset[bytes]

    def tell(self, instruction: do.Offer | do.TellInvalid | do.TellErase) -> None:
        """Forward the message; never blocks."""
        ...

    async def hbm(self, fingerprint: bytes, keys: list[bytes]) -> common_pb2.TierResidency | None:
        """What the worker holds of these chunks; None when it does not answer in time."""
        ...
