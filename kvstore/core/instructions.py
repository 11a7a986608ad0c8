"""Everything the core asks for: plain values, no behaviour. The shell (kvstore/node.py) executes them, in order.

Offsets and sizes are bytes; times are seconds from now.
"""

from __future__ import annotations

from dataclasses import dataclass

from contracts.ids import SessionKey
from contracts.kv import KvShape, Manifest
from kvstore.core.events import LoadId, SaveId, SourceKind, Tier, Want
from kvstore.core.tombstone import OpenErasure, Tombstone


@dataclass(frozen=True, slots=True)
class Found:
    """Tell the load's owner. `indices`: the chunks that come (for a worker always the leading ones)."""

    load: LoadId
    chunks: int
    near: bool
    indices: tuple[int, ...]
    in_arena: tuple[int, ...] = ()  #: those of `indices` whose wanted pieces are all readable already
    sources: tuple[SourceKind | None, ...] = ()  #: from where each of `indices` is expected; None: it is in the arena
    due_s: tuple[
        float, ...
    ] = ()  #: seconds until each of `indices`, and all before it, is in the arena, as reckoned (arrivals.py); not said to a hint


@dataclass(frozen=True, slots=True)
class Pieces:
    """Readable and leased to the load: (index, layer, offset, checksum), lowest layers first."""

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
    """One piece to bring: verify `checksum` after it is at `offset` of our arena."""

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
    """End this fetch early if that can be done: its slots are wanted. FetchDone follows as always, once nothing writes to them any more;
    what did not come has Fault.CANCELLED."""

    fetch: int


@dataclass(frozen=True, slots=True)
class Grant:
    """Answer to SaveWanted; `offsets` are chunk-major."""

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
    """Copy the chunk to the blob tier: from the SSD file, or from the arena when `offsets` are given; answer with BlobWritten."""

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
    """Let every node know, whenever it comes back, that the session was erased. Comes before its DeleteManifest."""

    tombstone: Tombstone


@dataclass(frozen=True, slots=True)
class NoteErasure:
    """Write it into this node's journal, in place of what that says of the session: it goes on after a restart."""

    erasure: OpenErasure


@dataclass(frozen=True, slots=True)
class DeleteManifest:
    session: SessionKey


@dataclass(frozen=True, slots=True)
class FetchManifest:
    """Read the session's manifest from the blob tier; answer with ManifestFetched."""

    session: SessionKey


@dataclass(frozen=True, slots=True)
class Offer:
    """Tell the worker of a device that an advised session is coming up. Times are seconds from now."""

    session: SessionKey
    fingerprint: bytes
    keys: tuple[bytes, ...]
    priority: int
    arrival_s: float
    expires_s: float
    device: int = 0


@dataclass(frozen=True, slots=True)
class TellInvalid:
    session: SessionKey


@dataclass(frozen=True, slots=True)
class TellErase:
    """Chunks leave HBM, and so does what is the cache of none but `sessions`: chunks that were never saved have no other name here.

    telling: unless 0, a worker that has acted on it is reported by EraseHeard.
    """

    keys: tuple[bytes, ...]
    sessions: tuple[SessionKey, ...] = ()
    telling: int = 0


@dataclass(frozen=True, slots=True)
class TierChanged:
    """A tier is used again (`up`), or is left alone from now on: what waits for it in the shell and has not begun is not tried."""

    tier: Tier
    up: bool
    reason: str


@dataclass(frozen=True, slots=True)
class TryTier:
    """Do one small operation of the tier's kind that moves `size` bytes where it moves any; answer with TierTried."""

    tier: Tier
    size: int


@dataclass(frozen=True, slots=True)
class Counted:
    """Something worth a metric: `what` is a word that kvstore/metrics.py knows, `labels` the values of its labels."""

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
    | DeleteManifest
    | FetchManifest
    | Offer
    | TellInvalid
    | TellErase
    | TierChanged
    | TryTier
    | Counted
)
