"""Everything the core is told: plain values, no behaviour. What it asks for in return is in instructions.py.

Times (`now`) are monotonic seconds of the caller's clock. Offsets and sizes are bytes. A `wants` entry is a chunk key and
the layers wanted of it.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import IntEnum

from contracts.ids import SessionKey
from contracts.kv import KvShape, Manifest
from kvstore.core.erasure_events import EraseHeard as EraseHeard
from kvstore.core.erasure_events import ErasureEnded as ErasureEnded
from kvstore.core.erasure_events import ErasureSeen as ErasureSeen
from kvstore.core.erasure_events import ErasuresReplayed as ErasuresReplayed
from kvstore.core.erasure_events import SessionErased as SessionErased
from kvstore.core.erasure_events import TombstonesListed as TombstonesListed


class LoadKind(IntEnum):
    """Who wants the pieces, most urgent first."""

    DEMAND = 0  #: a request waits in the worker
    PEER = 1  #: another node's store reads our arena
    PREFETCH = 2  #: the worker takes an advised session into free HBM
    ADVISED = 3  #: this store brings an advised session into the arena


class SourceKind(IntEnum):
    """Where a fetch reads, best first."""

    SSD = 0
    PEER = 1
    BLOB = 2


class Fault(IntEnum):
    """Why a piece did not come."""

    CORRUPT = 0  #: checksum, shape or length is wrong: the copy is deleted
    MISSING = 1  #: the object is not there
    UNAVAILABLE = 2  #: the source did not answer; the copy may be good
    NO_ROOM = 3  #: the arena is full of what may not be displaced for this
    MEDIUM = 4  #: the device reported an error: the copy is bad, or all of the device is
    CANCELLED = 5  #: the core took the fetch back (CancelFetch) before the piece came; nothing is wrong with the source


class Tier(IntEnum):
    """What is used, or left alone for a while, as one (health.py)."""

    SSD_READ = 0
    SSD_WRITE = 1
    BLOB_READ = 2
    BLOB_WRITE = 3


class Wrote(IntEnum):
    """How a write to a slower tier ended."""

    FAILED = 0  #: the reason says nothing about the next one
    OK = 1
    FULL = 2
    READ_ONLY = 3
    BROKEN = 4  #: the device reported an error, or the directory is not one that can be written
    NOT_TRIED = 5  #: the tier is left alone
    RESERVED = 6  #: nothing was written: what is left of the disk is kept free


#: (worker or reader, number chosen by it): unique while it is attached.
LoadId = tuple[str, str]
SaveId = tuple[str, int]
Want = tuple[bytes, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class FoundCopy:
    """A header that was read: the chunk exists there, with these checksums (one a layer). encoded_bytes: its length; 0: it is raw."""

    key: bytes
    shape: KvShape
    checksums: tuple[int, ...]
    encoded_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Recovered:
    """Chunks that the SSD holds, found at start."""

    copies: Sequence[FoundCopy]


@dataclass(frozen=True, slots=True)
class TierFailed:
    """The shell met a failure of a tier outside of any transfer: at start, in a listing."""

    tier: Tier
    reason: str
    now: float


@dataclass(frozen=True, slots=True)
class TierTried:
    """Answer to TryTier. size: bytes that were moved."""

    tier: Tier
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
    """The worker's (or the reader's) stream ended: everything of its is released."""

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
    """Answer to Probe: the copies that the blob tier has; what is not named is not there or did not answer in time.

    failed: how many of the questions the tier should have answered and did not.
    """

    load: LoadId
    keys: Sequence[bytes]
    found: Sequence[FoundCopy]
    now: float
    failed: int = 0


@dataclass(frozen=True, slots=True)
class PeerHolds:
    """The peer answered: these indices of the asked chunks will come. in_dram: those that are in its arena already. due_s: in how many
    seconds it means to have each of `indices` there; an old one does not say."""

    lease: str
    indices: Sequence[int]
    now: float
    in_dram: Sequence[int] = ()
    due_s: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class PeerReady:
    """(index, layer, offset in the peer's arena, checksum) of pieces that can be read now."""

    lease: str
    pieces: Sequence[tuple[int, int, int, int]]
    now: float


@dataclass(frozen=True, slots=True)
class PeerEnded:
    """Nothing more comes; `answered` is false when the peer failed."""

    lease: str
    answered: bool
    now: float


@dataclass(frozen=True, slots=True)
class FetchDone:
    """A fetch ended and its slots will not be written any more. `faults`: by index of the piece in the fetch.

    sums: likewise, the arena's checksums of the pieces whose bytes there are not those that were read (a codec decoded them).
    """

    fetch: int
    faults: dict[int, Fault]
    now: float
    sums: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FetchStalled:
    """A fetch takes too long: its loads go elsewhere; its slots stay out of use until FetchDone."""

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
    """`sums`: the checksums of the copy's pieces; empty: those of the arena. encoded_bytes: the file's length; 0: it is raw."""

    key: bytes
    outcome: Wrote
    now: float
    sums: tuple[int, ...] = ()
    encoded_bytes: int = 0


@dataclass(frozen=True, slots=True)
class BlobWritten:
    """`sums`: the checksums of the copy's pieces; empty: those that WriteBlob named."""

    key: bytes
    outcome: Wrote
    now: float
    sums: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class BlobListed:
    """All of a model's chunks that the blob tier has: what is owed to it can be told."""

    fingerprint: bytes
    keys: Set[bytes]
    now: float


@dataclass(frozen=True, slots=True)
class TierSized:
    """How many bytes may be in "ssd" (this node's files) or "blob" (all nodes'), None: no limit; of blob also how many there are."""

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
    """Manifests found in the blob tier. complete: all of them. wall: the wall clock's time, which `last_use_s` compares with."""

    manifests: Sequence[Manifest]
    now: float
    complete: bool = False
    wall: float = 0.0


@dataclass(frozen=True, slots=True)
class ManifestFetched:
    """Answer to FetchManifest; None: there is none, or the tier did not answer."""

    session: SessionKey
    manifest: Manifest | None
    now: float


@dataclass(frozen=True, slots=True)
class Advised:
    """A prefetch command. `arrival_s` (infinity: the hint says no time) and `lifetime_s` are seconds from now. device: of this node, that
    is to answer."""

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
class OrphansSought:
    """Some time has passed since the last one, and a complete list of sessions has just been seen."""

    now: float


@dataclass(frozen=True, slots=True)
class OldChunksListed:
    """Chunks in the blob tier that have been there for some time; sent after OrphansSought. fingerprint: at least its first half."""

    fingerprint: bytes
    keys: Sequence[bytes]
    now: float
    named: Container[bytes] = ()  #: chunks of sessions that the index does not keep; it may hold others too


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed: deadlines are checked."""

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
    | Tick
)
