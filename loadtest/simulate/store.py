"""A node's store in virtual time: the production core (`kvstore.core.store.Store`), with its instructions carried out
on the simulator's channels.

Replaces `kvstore/node.py` and its tiers: transfers take time, nothing fails, checksums are always 1.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from contracts.ids import SessionKey
from contracts.kv import KvShape, Manifest
from kvstore.core import events as ev
from kvstore.core import instructions as do
from kvstore.core.store import Store
from loadtest.simulate.channels import Channel, Job
from loadtest.simulate.costs import NodeKind
from loadtest.simulate.events import Events
from loadtest.simulate.mechanisms import SSD, Mechanisms
from runtime.sections import KvSection

#: Delay of a blob tier query, delay of a message to a peer, interval of ticks.
_PROBE_S, _PEER_S, _TICK_S = 0.01, 0.002, 1.0
_WRITE_BACK_BYTES = KvSection().write_back_limit_bytes
#: Events between two validations.
_VALIDATE_EVERY = 20_000


@dataclass(slots=True)
class Blob:
    """The blob tier, shared by all nodes."""

    chunks: dict[bytes, KvShape] = field(default_factory=dict)
    manifests: dict[SessionKey, Manifest] = field(default_factory=dict)


class Owner(Protocol):
    """The origin of a load: the node's worker, or a reading peer."""

    def answer(self, instruction: do.Instruction) -> None:
        """Take the store's instruction about a load, a save, or a hinted session."""
        ...


@dataclass(slots=True)
class Ways:
    """The channels into one node's arena."""

    disk: Channel
    link: Channel
    blob: Channel


class NodeStore:
    """See the module. shapes: of its models' KV. peers: stores of the whole fleet, by name. disturb: occupies the
    device for some seconds, to decode a codec. events: number handled."""

    def __init__(
        self,
        name: str,
        kind: NodeKind,
        shapes: Sequence[KvShape],
        events: Events,
        ways: Ways,
        blob: Blob,
        peers: dict[str, NodeStore],
        has: Mechanisms,
        disturb: Callable[[float], None],
    ) -> None:
        self._has, self._disturb = has, disturb
        self.name, self._clock, self._ways, self._blob, self._peers = name, events, ways, blob, peers
        self.core = Store(
            name, int(kind.dram_bytes), write_back_limit_bytes=_WRITE_BACK_BYTES, layer_priority=has.layer_priority
        )
        self.writes = Channel(events, kind.ssd_bytes_per_s)
        self.owners: dict[str, Owner] = {}
        self.events = 0
        self._inbox: deque[ev.Event] = deque()
        self._working = self._ticking = False
        self._fetches: dict[int, tuple[Channel, Job, do.Fetch]] = {}
        self.handle(ev.Recovered([]))
        self.handle(ev.TierSized("ssd", int(kind.ssd_bytes) if SSD in has.tiers else 0, 0.0))
        self.handle(ev.ManifestsListed([], 0.0, complete=True))
        self.handle(ev.ShapesDeclared("worker", list(shapes), 0.0))

    @property
    def now(self) -> float:
        """Virtual seconds."""
        return self._clock.now

    def handle(self, event: ev.Event) -> None:
        """Give the core an event and carry out its instructions; events that these cause are handled afterwards."""
        self._inbox.append(event)
        if self._working:
            return
        self._working = True
        while self._inbox or self.core.unplanned:
            if not self._inbox:
                self._inbox.append(ev.PlanMore(self.now))
            self.events += 1
            for instruction in self.core.handle(self._inbox.popleft()):
                self._do(instruction)
            if self.events % _VALIDATE_EVERY == 0:
                self.core.validate()
        self._working = False
        if self.core.busy and not self._ticking:
            self._ticking = True
            self._later(_TICK_S, self._tick)

    def _tick(self) -> None:
        self._ticking = False
        self.handle(ev.Tick(self.now))

    def _later(self, delay_s: float, do_it: Callable[[], None]) -> None:
        self._clock.at(self.now + delay_s, do_it)

    def _do(self, i: do.Instruction) -> None:
        match i:
            case do.Found() | do.Pieces() | do.End():
                self._tell(i.load[0], i)
            case do.Grant():
                self._tell(i.save[0], i)
            case do.Offer() | do.TellInvalid():
                self._tell("worker", i)
            case do.TellErase() if i.notice:
                self._inbox.extend(ev.EraseHeard(owner, i.notice, self.now) for owner in self.owners)
            case do.Fetch():
                self._fetch(i)
            case do.CancelFetch():
                self._cancel(i.fetch)
            case do.Probe():
                self._later(_PROBE_S, lambda: self._probe(i))
            case do.AskPeer():
                self._later(_PEER_S, lambda: Loan(self, self._peers[i.peer], i).begin())
            case do.ReleasePeer():
                self._later(_PEER_S, lambda: self._peers[i.peer].let_go(f"peer-{self.name}-{i.lease}"))
            case do.Sum():
                self._inbox.append(ev.Summed(i.key, (1,) * i.shape.layers, self.now))
            case do.WriteSsd():
                self.writes.send(
                    float(i.shape.chunk_bytes), (0, 0), lambda: self.handle(ev.SsdWritten(i.key, ev.Wrote.OK, self.now))
                )
            case do.WriteBlob():
                self._blob.chunks[i.key] = i.shape
                self._later(_PROBE_S, lambda: self.handle(ev.BlobWritten(i.key, ev.Wrote.OK, self.now)))
            case do.DeleteBlob():
                self._blob.chunks.pop(i.key, None)
            case do.PutManifest():
                self._blob.manifests[i.manifest.session] = i.manifest
            case do.FetchManifest():
                self._later(
                    _PROBE_S,
                    lambda: self.handle(ev.ManifestFetched(i.session, self._blob.manifests.get(i.session), self.now)),
                )
            case do.TryTier():
                self._inbox.append(ev.TierTried(i.tier, ev.Wrote.OK, i.size, self.now))
            case _:
                pass

    def _tell(self, owner: str, instruction: do.Instruction) -> None:
        there = self.owners.get(owner)
        if there is not None:
            there.answer(instruction)

    # ---- reading
    def _fetch(self, fetch: do.Fetch) -> None:
        way = {
            ev.SourceKind.SSD: self._ways.disk,
            ev.SourceKind.PEER: self._ways.link,
            ev.SourceKind.BLOB: self._ways.blob,
        }[fetch.kind]
        times = 1.0 if fetch.kind is ev.SourceKind.SSD else self._has.codec
        job = way.send(len(fetch.pieces) * fetch.shape.piece_bytes / times, (0, 0), lambda: self._fetched(fetch.fetch))
        self._fetches[fetch.fetch] = (way, job, fetch)

    def _fetched(self, number: int) -> None:
        _, _, fetch = self._fetches.pop(number)
        if self._has.decode_bytes_per_s and fetch.kind is not ev.SourceKind.SSD:
            self._disturb(len(fetch.pieces) * fetch.shape.piece_bytes / self._has.decode_bytes_per_s)
        self.handle(ev.FetchDone(number, {}, self.now))

    def _cancel(self, number: int) -> None:
        known = self._fetches.pop(number, None)
        if known is not None:
            way, job, fetch = known
            way.cancel(job)
            self._inbox.append(
                ev.FetchDone(number, dict.fromkeys(range(len(fetch.pieces)), ev.Fault.CANCELLED), self.now)
            )

    def _probe(self, probe: do.Probe) -> None:
        found = [(key, self._blob.chunks[key]) for key in probe.keys if key in self._blob.chunks]
        self.handle(
            ev.Probed(
                probe.load,
                probe.keys,
                [ev.FoundCopy(key, shape, (1,) * shape.layers) for key, shape in found],
                self.now,
            )
        )

    def let_go(self, owner: str) -> None:
        """End a peer's lease."""
        if self.owners.pop(owner, None) is not None:
            self.handle(ev.WorkerGone(owner, self.now))


class Loan:
    """A lease: a store sends pieces to a reading peer."""

    def __init__(self, reader: NodeStore, lender: NodeStore, ask: do.AskPeer) -> None:
        self._reader, self._lender, self._ask, self._owner = reader, lender, ask, f"peer-{reader.name}-{ask.lease}"

    def begin(self) -> None:
        """Ask the lending store."""
        self._lender.owners[self._owner] = self
        load = (self._owner, "0")
        self._lender.handle(
            ev.LoadWanted(load, ev.LoadKind.PEER, None, self._ask.fingerprint, self._ask.wants, (), 0, self._lender.now)
        )

    def answer(self, instruction: do.Instruction) -> None:
        """Pass the answer on, over the network."""
        lease, reader = self._ask.lease, self._reader
        match instruction:
            case do.Found():
                indices, in_arena, due_s = instruction.indices, instruction.in_arena, instruction.due_s
                self._pass(lambda: ev.PeerHolds(lease, indices, reader.now, in_arena, due_s))
            case do.Pieces():
                pieces = instruction.pieces
                self._pass(lambda: ev.PeerReady(lease, pieces, reader.now))
            case do.End():
                self._pass(lambda: ev.PeerEnded(lease, True, reader.now))
            case _:
                pass

    def _pass(self, event: Callable[[], ev.Event]) -> None:
        self._reader._later(_PEER_S, lambda: self._reader.handle(event()))
