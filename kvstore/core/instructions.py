"""The core's output: plain values, no behaviour. The shell (kvstore/node.py) executes them, in order.

Offsets and sizes are bytes; times are seconds from now.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from contracts.ids import SessionKey
from contracts.kv import KvShape, Manifest
from kvstore.core.events import LoadId, SaveId, SourceKind, TierChannel, Want
from kvstore.core.tombstone import OpenErasure, Tombstone


@dataclass(frozen=True, slots=True)
class Found:
    """Tell the load's owner which chunks come. indices: for a worker always the leading ones. near: all of them are
    in the arena, and there is at least one."""

    load: LoadId
    chunks: int
    near: bool
    indices: tuple[int, ...]
    in_arena: tuple[int, ...] = ()  #: those of `indices` whose wanted pieces are all READY
    sources: tuple[SourceKind | None, ...] = ()  #: by index, the expected source; None: in the arena
    #: Estimated seconds until each of `indices`, and all before it, is in the arena (arrivals.py); empty for hints.
    due_s: tuple[float, ...] = ()
    session: SessionKey | None = field(default=None, compare=False)  #: whose load it is, for traces


@dataclass(frozen=True, slots=True)
class Pieces:
    """Pieces leased to the load: (index, layer, offset, checksum), lowest layers first."""

    load: LoadId
    pieces: tuple[tuple[int, int, int, int], ...]


@dataclass(frozen=True, slots=True)
class End:
    load: LoadId
    usable: int


@dataclass(frozen=True, slots=True)
class Probe:
    """Read these chunks' headers in the blob tier; answer with Probed within `timeout_s`."""

    load: LoadId
    keys: tuple[bytes, ...]
    timeout_s: float


@dataclass(frozen=True, slots=True)
class AskPeer:
    """Open a lease at the peer; answer with PeerHolds, PeerReady, PeerEnded."""

    lease: str
    peer: str
    fingerprint: bytes
    wants: tuple[Want, ...]


@dataclass(frozen=True, slots=True)
class ReleasePeer:
    lease: str
    peer: str


@dataclass(frozen=True, slots=True)
class FetchPiece:
    """One piece to bring: verify `checksum` after it is at `offset` of our arena. UNREAD (chunk.py): the header of the
    SSD's file has it."""

    key: bytes
    layer: int
    offset: int
    remote_offset: int  #: in the peer's arena; 0 for other sources
    checksum: int


@dataclass(frozen=True, slots=True)
class Fetch:
    """Read pieces from one source; answer with FetchDone. SSD and BLOB fetches hold consecutive layers of one chunk."""

    fetch: int
    kind: SourceKind
    shape: KvShape
    pieces: tuple[FetchPiece, ...]
    lease: str
    peer: str
    give_up_s: float  #: report FetchStalled when it has not ended by then


@dataclass(frozen=True, slots=True)
class CancelFetch:
    """End this fetch early if possible. FetchDone follows as always, once nothing writes to its slots any more; pieces
    that did not come have Fault.CANCELLED."""

    fetch: int


@dataclass(frozen=True, slots=True)
class Grant:
    """Answer to SaveWanted. offsets: of all layers of the granted `indices`, chunk-major."""

    save: SaveId
    indices: tuple[int, ...]
    offsets: tuple[int, ...]
    held: tuple[int, ...]
    refused: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Sum:
    """Compute the checksums of these pieces (layer order); answer with Summed."""

    key: bytes
    shape: KvShape
    offsets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WriteSsd:
    """Write the chunk from the arena; its slots stay until SsdWritten."""

    key: bytes
    shape: KvShape
    offsets: tuple[int, ...]
    checksums: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WriteBlob:
    """Copy the chunk to the blob tier: from the SSD file, or from the arena when `offsets` are given; answer with
    BlobWritten. checksums: empty where only the file's header has them."""

    key: bytes
    shape: KvShape
    offsets: tuple[int, ...]
    checksums: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DeleteSsd:
    key: bytes
    fingerprint: bytes


@dataclass(frozen=True, slots=True)
class DeleteBlob:
    key: bytes
    fingerprint: bytes


@dataclass(frozen=True, slots=True)
class PutManifest:
    manifest: Manifest


@dataclass(frozen=True, slots=True)
class PutTombstone:
    """Write the tombstone to blob. Comes before the session's DeleteManifest."""

    tombstone: Tombstone


@dataclass(frozen=True, slots=True)
class NoteErasure:
    """Write the erasure to this node's journal, replacing the session's earlier entry."""

    erasure: OpenErasure


@dataclass(frozen=True, slots=True)
class DeleteKeys:
    """Delete the keys of the session's lives below `number`, first of all: then no copy of its encrypted chunks can be
    read. expired: all of its keys; its life goes on."""

    session: SessionKey
    number: int
    expired: bool = False


@dataclass(frozen=True, slots=True)
class DeleteManifest:
    session: SessionKey


@dataclass(frozen=True, slots=True)
class FetchManifest:
    """Read the session's manifest from the blob tier; answer with ManifestFetched."""

    session: SessionKey


@dataclass(frozen=True, slots=True)
class Offer:
    """Offer an advised session to the device's worker. Times are seconds from now. note: of its manifest."""

    session: SessionKey
    fingerprint: bytes
    keys: tuple[bytes, ...]
    priority: int
    arrival_s: float
    expires_s: float
    device: int = 0
    note: bytes = b""


@dataclass(frozen=True, slots=True)
class TellInvalid:
    session: SessionKey


@dataclass(frozen=True, slots=True)
class TellErase:
    """Tell workers to delete these chunks from HBM, and all chunks that only `sessions` use, saved or not.

    notice: unless 0, EraseHeard follows when a worker has acted on it.
    """

    keys: tuple[bytes, ...]
    sessions: tuple[SessionKey, ...] = ()
    notice: int = 0


@dataclass(frozen=True, slots=True)
class TierChanged:
    """A tier is in use again (`up`) or has degraded: then writes that wait in the shell are not tried."""

    tier: TierChannel
    up: bool
    reason: str


@dataclass(frozen=True, slots=True)
class TryTier:
    """Try the tier with one operation that moves about `size` bytes; answer with TierTried."""

    tier: TierChannel
    size: int


@dataclass(frozen=True, slots=True)
class Counted:
    """Count a metric (kvstore/metrics.py). labels: the values of its labels."""

    what: str
    amount: int = 1
    labels: tuple[str, ...] = ()


Instruction = (
    Found
    | Pieces
    | End
    | Probe
    | AskPeer
    | ReleasePeer
    | Fetch
    | CancelFetch
    | Grant
    | Sum
    | WriteSsd
    | WriteBlob
    | DeleteSsd
    | DeleteBlob
    | PutManifest
    | NoteErasure
    | PutTombstone
    | DeleteKeys
    | DeleteManifest
    | FetchManifest
    | Offer
    | TellInvalid
    | TellErase
    | TierChanged
    | TryTier
    | Counted
)
