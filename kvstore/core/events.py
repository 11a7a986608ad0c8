"""The core's input: plain values, no behaviour. Its output is in instructions.py.

Times (`now`) are monotonic seconds of the caller's clock. Offsets and sizes are bytes. A `wants` entry is a chunk key
and the layers wanted of it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from contracts.ids import SessionKey
from contracts.kv import KvShape, Manifest
from kvstore.core.erasure_events import EraseHeard as EraseHeard
from kvstore.core.erasure_events import ErasureEnded as ErasureEnded
from kvstore.core.erasure_events import ErasureSeen as ErasureSeen
from kvstore.core.erasure_events import ErasuresReplayed as ErasuresReplayed
from kvstore.core.erasure_events import OldChunksListed as OldChunksListed
from kvstore.core.erasure_events import OrphansSought as OrphansSought
from kvstore.core.erasure_events import SessionErased as SessionErased
from kvstore.core.erasure_events import TombstonesListed as TombstonesListed


class LoadKind(IntEnum):
    """Who wants the pieces, most urgent first."""

    DEMAND = 0  #: a request waits in the worker
    PEER = 1  #: another node's store reads our arena
    PREFETCH = 2  #: the worker takes an advised session into free HBM
    ADVISED = 3  #: this store brings an advised session into the arena


class SourceKind(IntEnum):
    """Where a fetch reads, in the order that ties keep."""

    SSD = 0
    PEER = 1
    BLOB = 2


class Fault(IntEnum):
    """Why a piece did not come."""

    CORRUPT = 0  #: checksum, shape or length is wrong: the copy is deleted
    MISSING = 1  #: the object is not there
    UNAVAILABLE = 2  #: the source did not answer; the copy may be good
    NO_ROOM = 3  #: the arena is full of pieces that may not be evicted for this load
    MEDIUM = 4  #: the device reported an error: the copy is bad, or the whole device
    CANCELLED = 5  #: the core cancelled the fetch (CancelFetch) before the piece came; the source is not at fault
    ERASED = 6  #: it is encrypted and its session's key was erased: the copy is unreadable and is deleted
    LOCKED = 7  #: it is encrypted and its session's key cannot be read now; the copy may be good


class TierChannel(IntEnum):
    """What is in use or degraded as one (health.py)."""

    SSD_READ = 0
    SSD_WRITE = 1
    BLOB_READ = 2
    BLOB_WRITE = 3


class Wrote(IntEnum):
    """How a write to a slower tier ended."""

    FAILED = 0  #: the next write may succeed
    OK = 1
    FULL = 2
    READ_ONLY = 3
    BROKEN = 4  #: the device reported an error, or the directory is unusable
    NOT_TRIED = 5  #: the tier is degraded
    RESERVED = 6  #: nothing was written: the rest of the disk is reserved (kv.disk_reserve)
    LOST = 7  #: of a write from the SSD: its copy is damaged, missing, or nobody has its key
    UNREADABLE = 8  #: of a write from the SSD: its copy, or that one's key, cannot be read now


#: (owner, number chosen by it): unique while the owner, a worker or reading peer, is attached.
LoadId = tuple[str, str]
SaveId = tuple[str, int]
Want = tuple[bytes, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class FoundCopy:
    """A header that was read: the chunk exists there, with one checksum per layer. encoded_bytes: its length; 0 if
    raw."""

    key: bytes
    shape: KvShape
    checksums: tuple[int, ...]
    encoded_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Recovered:
    """Chunks found on the SSD at the start. copies: their headers were read. listed: by shape, keys of raw files whose
    names were; each header is read with the first piece of its chunk."""

    copies: Sequence[FoundCopy] = ()
    listed: Sequence[tuple[KvShape, Sequence[bytes]]] = ()


@dataclass(frozen=True, slots=True)
class TierFailed:
    """A tier failed outside of a transfer: at the start, or in a listing."""

    tier: TierChannel
    reason: str
    now: float


@dataclass(frozen=True, slots=True)
class TierTried:
    """Answer to TryTier. size: bytes moved."""

    tier: TierChannel
    outcome: Wrote
    size: int
    now: float


@dataclass(frozen=True, slots=True)
class ShapesDeclared:
    """A worker attached with these models."""

    worker: str
    shapes: Sequence[KvShape]
    now: float


@dataclass(frozen=True, slots=True)
class WorkerGone:
    """The stream of a worker or reading peer ended: everything it holds is released."""

    worker: str
    now: float


@dataclass(frozen=True, slots=True)
class LoadWanted:
    load: LoadId
    kind: LoadKind
    session: SessionKey | None
    fingerprint: bytes
    wants: Sequence[Want]  #: empty layers: all of them
    sources: Sequence[str]
    priority: int
    now: float


@dataclass(frozen=True, slots=True)
class PiecesTaken:
    load: LoadId
    pieces: Sequence[tuple[int, int]]  #: (index in wants, layer)
    now: float


@dataclass(frozen=True, slots=True)
class LoadCancelled:
    load: LoadId
    now: float


@dataclass(frozen=True, slots=True)
class Probed:
    """Answer to Probe: the copies in blob. A key without a copy is not there, or was not answered in time.

    failed: number of questions that the tier should have answered and did not.
    """

    load: LoadId
    keys: Sequence[bytes]
    found: Sequence[FoundCopy]
    now: float
    failed: int = 0


@dataclass(frozen=True, slots=True)
class PeerHolds:
    """The peer answered: these indices of the asked chunks will come. in_dram: those in its arena already. due_s:
    seconds until it expects each of `indices` there; may be empty."""

    lease: str
    indices: Sequence[int]
    now: float
    in_dram: Sequence[int] = ()
    due_s: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class PeerReady:
    """Pieces readable at the peer now: (index, layer, offset in its arena, checksum)."""

    lease: str
    pieces: Sequence[tuple[int, int, int, int]]
    now: float


@dataclass(frozen=True, slots=True)
class PeerEnded:
    """Nothing more comes. answered: false when the peer failed."""

    lease: str
    answered: bool
    now: float


@dataclass(frozen=True, slots=True)
class FetchDone:
    """A fetch ended, and nothing writes to its slots any more. faults: by index of the piece in the fetch. sums:
    likewise, the arena's checksums of pieces that a codec decoded or whose checksum was UNREAD."""

    fetch: int
    faults: dict[int, Fault]
    now: float
    sums: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FetchStalled:
    """A fetch takes too long: its loads try other sources; its slots stay reserved until FetchDone."""

    fetch: int
    now: float


@dataclass(frozen=True, slots=True)
class SaveWanted:
    save: SaveId
    session: SessionKey
    fingerprint: bytes
    keys: Sequence[bytes]
    now: float


@dataclass(frozen=True, slots=True)
class SaveEnded:
    save: SaveId
    ok: Sequence[int]
    aborted: Sequence[int]
    now: float


@dataclass(frozen=True, slots=True)
class Summed:
    """Checksums of a saved chunk's pieces, in layer order."""

    key: bytes
    checksums: tuple[int, ...]
    now: float


@dataclass(frozen=True, slots=True)
class SsdWritten:
    """sums: checksums of the copy's pieces; empty: those of the arena. encoded_bytes: the file's length; 0 if raw."""

    key: bytes
    outcome: Wrote
    now: float
    sums: tuple[int, ...] = ()
    encoded_bytes: int = 0


@dataclass(frozen=True, slots=True)
class BlobWritten:
    """sums: checksums of the copy's pieces; empty: those in WriteBlob."""

    key: bytes
    outcome: Wrote
    now: float
    sums: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class BlobListed:
    """Some of a model's chunks in blob. complete: the last of them, so that missing ones can be written."""

    fingerprint: bytes
    keys: Collection[bytes]
    now: float
    complete: bool = True


@dataclass(frozen=True, slots=True)
class TierSized:
    """The size limit of "ssd" (this node's files) or "blob" (all nodes'); None: no limit. held_bytes: of blob."""

    tier: str
    limit_bytes: int | None
    now: float
    held_bytes: int = 0


@dataclass(frozen=True, slots=True)
class TurnEnded:
    manifest: Manifest
    now: float
    worker: str = ""


@dataclass(frozen=True, slots=True)
class ManifestsListed:
    """Manifests found in blob. complete: these, with earlier pages, are all. wall: wall-clock time, for comparison with
    `last_use_s`."""

    manifests: Sequence[Manifest]
    now: float
    complete: bool = False
    wall: float = 0.0


@dataclass(frozen=True, slots=True)
class ManifestFetched:
    """Answer to FetchManifest. None: there is none, or blob did not answer."""

    session: SessionKey
    manifest: Manifest | None
    now: float


@dataclass(frozen=True, slots=True)
class Advised:
    """A prefetch command. arrival_s (infinity: unknown) and lifetime_s are seconds from now. device: number on this
    node of the device where the turn will run."""

    session: SessionKey
    priority: int
    arrival_s: float
    lifetime_s: float
    sources: Sequence[str]
    now: float
    device: int = 0


@dataclass(frozen=True, slots=True)
class Invalidated:
    session: SessionKey
    now: float


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed: deadlines are checked."""

    now: float


@dataclass(frozen=True, slots=True)
class PlanMore:
    """Other events have had their turn: plan more of long hints (`Store.unplanned`)."""

    now: float


Event = (
    Recovered
    | TierFailed
    | TierTried
    | ShapesDeclared
    | WorkerGone
    | LoadWanted
    | PiecesTaken
    | LoadCancelled
    | Probed
    | PeerHolds
    | PeerReady
    | PeerEnded
    | FetchDone
    | FetchStalled
    | SaveWanted
    | SaveEnded
    | Summed
    | SsdWritten
    | BlobWritten
    | BlobListed
    | TierSized
    | TurnEnded
    | ManifestsListed
    | ManifestFetched
    | Advised
    | Invalidated
    | SessionErased
    | EraseHeard
    | ErasureSeen
    | ErasureEnded
    | ErasuresReplayed
    | TombstonesListed
    | OrphansSought
    | OldChunksListed
    | PlanMore
    | Tick
)
