"""Which peers and the blob tier a load asks, and in which order, until it is known which chunks can be brought.

Peers are asked soonest first, then the blob tier. A peer clearly slower than the blob tier is asked only for what that
lacks. When a peer turns out slow under its lease, its chunks are probed in the blob tier and taken from there if that
is sooner.
"""

from __future__ import annotations

from collections.abc import Iterable

from contracts.kv import leading
from kvstore.core.events import LoadId, LoadKind, PeerHolds, SourceKind
from kvstore.core.index import Index
from kvstore.core.instructions import Instruction, Probe
from kvstore.core.leases import Leases
from kvstore.core.load import StoreLoad
from kvstore.core.meter import Meter
from kvstore.core.sources import Sources
from kvstore.core.waiting import Waiting

#: Seconds the blob tier may take to answer a probe; the short time applies to a request that has some chunks already.
PROBE_S, SHORT_PROBE_S = 1.5, 0.3
#: A peer's `due_s` above this many seconds is ignored.
_MOST_DUE_S = 600.0
_MORE_PROBES, _PROBE_LIMIT = 4, 256


class Locating:
    """See the module. Of a load it changes only `asking`, `asked`, `probing`, `probe_size`, `sources` and
    `deferred`."""

    def __init__(
        self, index: Index, meter: Meter, sources: Sources, leases: Leases, waiting: Waiting, out: list[Instruction]
    ) -> None:
        self._index = index
        self._meter = meter
        self._sources = sources
        self._leases = leases
        self._waiting = waiting
        self._out = out

    def advance(self, load: StoreLoad, now: float) -> bool:
        """Ask the next source that could help. True when there is none left to ask or wait for."""
        if load.asking or load.probing:
            return False
        while (peer := self._sources.next_peer(load)) is not None:
            if self._sources.blob_first(load, peer):
                load.deferred.append(peer)
            elif self._ask(load, peer, now):
                return False
        unknown = [i for i in range(load.found) if not self._sources.obtainable(load, i)]
        if (
            unknown
            and load.leading_only
            and self._meter.reads(SourceKind.BLOB)
            and load.wants[unknown[0]][0] not in load.probed
        ):
            self._probe(load, [load.wants[i][0] for i in unknown])
            return False
        while unknown and load.deferred:
            if self._ask(load, load.deferred.pop(0), now):
                return False
        return True

    def _ask(self, load: StoreLoad, peer: str, now: float) -> bool:
        load.asked = self._sources.to_ask(load, peer)
        if load.asked:
            wants = [(load.wants[i][0], self._sources.absent(load, i)) for i in load.asked]
            load.asking = self._leases.ask(
                peer, load.shape.fingerprint, wants, load.kind, load.priority, load.arrival, load.order, now
            )
        return bool(load.asked)

    def _probe(self, load: StoreLoad, unknown: list[bytes]) -> None:
        """Probe the leading keys that manifests name, else a growing number: most unknown tails are in no tier."""
        named = leading(key in self._index.names for key in unknown)
        count = min(max(named, load.probe_size), _PROBE_LIMIT)
        load.probe_size *= _MORE_PROBES
        keys = tuple(key for key in unknown[:count] if key not in load.probed)
        load.probing = frozenset(keys)
        hurry = load.acquired > 0 and not named and load.kind is LoadKind.DEMAND
        self._out.append(Probe(load.ident, keys, SHORT_PROBE_S if hurry else PROBE_S))

    def probe_again(self, load: StoreLoad, key: bytes) -> bool:
        """Probe the blob tier for a chunk that lost a piece. False when that cannot help: it was asked, or is not
        read."""
        if not load.leading_only or key in load.probed or not self._meter.reads(SourceKind.BLOB):
            return False
        if key not in load.probing:
            load.probing |= {key}
            self._out.append(Probe(load.ident, (key,), PROBE_S))
        return True

    def peer_holds(self, event: PeerHolds, loads: Iterable[StoreLoad]) -> bool:
        """The peer's answer. Chunks that another source would bring sooner are not taken from it. False when the lease
        is not open."""
        indices, in_dram = list(dict.fromkeys(event.indices)), frozenset(event.in_dram)
        due_s = {
            i: seconds for i, seconds in zip(event.indices, event.due_s, strict=False) if 0.0 <= seconds <= _MOST_DUE_S
        }
        for load in loads:
            if load.asking == event.lease:
                indices = self._sources.accepted(load, self._leases.peer_of(event.lease), load.asked, indices, in_dram)
        return self._leases.holds(event.lease, indices, in_dram, due_s, event.now)

    def leave_slow_peers(self, loads: dict[LoadId, StoreLoad], now: float) -> None:
        """Time passed: pieces that slow peers owe are taken from a sooner tier; chunks not known there are probed."""
        for lease, remaining_s in self._leases.late(now):
            left: set[bytes] = set()
            unknown: dict[LoadId, dict[bytes, None]] = {}
            expected = self._leases.expected(lease)
            size = sum(self._index.chunks[key].shape.piece_bytes for key, _ in expected)
            for key, layer in expected:
                waiting = [loads[ident] for ident in self._waiting.of(key, layer) if loads[ident].leading_only]
                if waiting and all(self._sources.leaves(load, key, remaining_s, size) for load in waiting):
                    left.add(key)
                elif (
                    waiting and key not in waiting[0].probed | waiting[0].probing and self._meter.reads(SourceKind.BLOB)
                ):
                    unknown.setdefault(waiting[0].ident, {})[key] = None
            for ident, keys in unknown.items():
                probed = tuple(keys)[:_PROBE_LIMIT]
                loads[ident].probing |= set(probed)
                self._out.append(Probe(ident, probed, PROBE_S))
            if left:
                self._leases.leave(lease, left, now)
