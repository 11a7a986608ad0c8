"""The interface of a store node to its parts; implemented by `kvstore.node.StoreNode`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from kvstore.core import events as ev
from kvstore.core.store import Store
from kvstore.owners import Attached
from kvstore.sizes import Sizes
from kvstore.tiers.blob import BlobTier
from kvstore.tiers.catalogue import Catalogue
from kvstore.tiers.older_formats import OlderFormats
from kvstore.tiers.ssd import SsdTier
from kvstore.tiers.transport import LeasedRanges
from kvstore.writeback import WriteBack
from runtime.clock import Clock
from runtime.places import NodePlaces


class StoreHost(Protocol):
    """Read-only, except through `handle`."""

    @property
    def name(self) -> str: ...
    @property
    def clock(self) -> Clock: ...
    @property
    def places(self) -> NodePlaces: ...
    @property
    def store(self) -> Store: ...
    @property
    def ssd(self) -> SsdTier: ...
    @property
    def blob(self) -> BlobTier: ...
    @property
    def older(self) -> OlderFormats: ...
    @property
    def catalogue(self) -> Catalogue: ...
    @property
    def write_back(self) -> WriteBack: ...
    @property
    def sizes(self) -> Sizes: ...
    @property
    def leased(self) -> LeasedRanges: ...
    @property
    def workers(self) -> Mapping[str, Attached]: ...

    @property
    def knows_ssd(self) -> bool:
        """Whether the SSD's chunks are known: it was read since the start."""
        ...

    def fail(self, error: Exception) -> None:
        """End the process, so that a new one replaces it."""
        ...

    def may_write(self) -> bool:
        """Whether this process holds the lock on the node's directory."""
        ...

    def handle(self, event: ev.Event) -> None:
        """Give the core an event and execute its instructions."""
        ...
