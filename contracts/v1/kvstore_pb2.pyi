from contracts.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LoadClass(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DEMAND: _ClassVar[LoadClass]
    PREFETCH: _ClassVar[LoadClass]
DEMAND: LoadClass
PREFETCH: LoadClass

class WorkerToStore(_message.Message):
    __slots__ = ("hello", "load", "taken", "cancel", "save", "saved", "turn", "hbm")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    SAVE_FIELD_NUMBER: _ClassVar[int]
    SAVED_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    HBM_FIELD_NUMBER: _ClassVar[int]
    hello: AttachHello
    load: LoadRequest
    taken: LoadTaken
    cancel: LoadCancel
    save: SaveRequest
    saved: SaveDone
    turn: Turn
    hbm: HbmResidency
    def __init__(self, hello: _Optional[_Union[AttachHello, _Mapping]] = ..., load: _Optional[_Union[LoadRequest, _Mapping]] = ..., taken: _Optional[_Union[LoadTaken, _Mapping]] = ..., cancel: _Optional[_Union[LoadCancel, _Mapping]] = ..., save: _Optional[_Union[SaveRequest, _Mapping]] = ..., saved: _Optional[_Union[SaveDone, _Mapping]] = ..., turn: _Optional[_Union[Turn, _Mapping]] = ..., hbm: _Optional[_Union[HbmResidency, _Mapping]] = ...) -> None: ...

class AttachHello(_message.Message):
    __slots__ = ("worker_id", "shapes", "device")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    SHAPES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    shapes: _containers.RepeatedCompositeFieldContainer[_common_pb2.KvShape]
    device: int
    def __init__(self, worker_id: _Optional[str] = ..., shapes: _Optional[_Iterable[_Union[_common_pb2.KvShape, _Mapping]]] = ..., device: _Optional[int] = ...) -> None: ...

class LoadRequest(_message.Message):
    __slots__ = ("load_id", "load_class", "session", "fingerprint", "chunks", "source_nodes", "priority", "request_id", "trace")
    LOAD_ID_FIELD_NUMBER: _ClassVar[int]
    LOAD_CLASS_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_NODES_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    load_id: int
    load_class: LoadClass
    session: _common_pb2.Session
    fingerprint: bytes
    chunks: _containers.RepeatedCompositeFieldContainer[ChunkWant]
    source_nodes: _containers.RepeatedScalarFieldContainer[str]
    priority: int
    request_id: str
    trace: str
    def __init__(self, load_id: _Optional[int] = ..., load_class: _Optional[_Union[LoadClass, str]] = ..., session: _Optional[_Union[_common_pb2.Session, _Mapping]] = ..., fingerprint: _Optional[bytes] = ..., chunks: _Optional[_Iterable[_Union[ChunkWant, _Mapping]]] = ..., source_nodes: _Optional[_Iterable[str]] = ..., priority: _Optional[int] = ..., request_id: _Optional[str] = ..., trace: _Optional[str] = ...) -> None: ...

class ChunkWant(_message.Message):
    __slots__ = ("key", "layers")
    KEY_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    layers: bytes
    def __init__(self, key: _Optional[bytes] = ..., layers: _Optional[bytes] = ...) -> None: ...

class LoadTaken(_message.Message):
    __slots__ = ("load_id", "chunks", "layers")
    LOAD_ID_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    load_id: int
    chunks: _containers.RepeatedScalarFieldContainer[int]
    layers: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, load_id: _Optional[int] = ..., chunks: _Optional[_Iterable[int]] = ..., layers: _Optional[_Iterable[int]] = ...) -> None: ...

class LoadCancel(_message.Message):
    __slots__ = ("load_id",)
    LOAD_ID_FIELD_NUMBER: _ClassVar[int]
    load_id: int
    def __init__(self, load_id: _Optional[int] = ...) -> None: ...

class SaveRequest(_message.Message):
    __slots__ = ("save_id", "session", "fingerprint", "keys", "request_id", "trace")
    SAVE_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    save_id: int
    session: _common_pb2.Session
    fingerprint: bytes
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    request_id: str
    trace: str
    def __init__(self, save_id: _Optional[int] = ..., session: _Optional[_Union[_common_pb2.Session, _Mapping]] = ..., fingerprint: _Optional[bytes] = ..., keys: _Optional[_Iterable[bytes]] = ..., request_id: _Optional[str] = ..., trace: _Optional[str] = ...) -> None: ...

class SaveDone(_message.Message):
    __slots__ = ("save_id", "ok", "aborted")
    SAVE_ID_FIELD_NUMBER: _ClassVar[int]
    OK_FIELD_NUMBER: _ClassVar[int]
    ABORTED_FIELD_NUMBER: _ClassVar[int]
    save_id: int
    ok: _containers.RepeatedScalarFieldContainer[int]
    aborted: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, save_id: _Optional[int] = ..., ok: _Optional[_Iterable[int]] = ..., aborted: _Optional[_Iterable[int]] = ...) -> None: ...

class Turn(_message.Message):
    __slots__ = ("manifest",)
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    manifest: _common_pb2.Manifest
    def __init__(self, manifest: _Optional[_Union[_common_pb2.Manifest, _Mapping]] = ...) -> None: ...

class HbmResidency(_message.Message):
    __slots__ = ("query_id", "hbm")
    QUERY_ID_FIELD_NUMBER: _ClassVar[int]
    HBM_FIELD_NUMBER: _ClassVar[int]
    query_id: int
    hbm: _common_pb2.TierResidency
    def __init__(self, query_id: _Optional[int] = ..., hbm: _Optional[_Union[_common_pb2.TierResidency, _Mapping]] = ...) -> None: ...

class StoreToWorker(_message.Message):
    __slots__ = ("welcome", "found", "pieces", "end", "grant", "offer", "invalidate", "erase", "hbm_query")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    FOUND_FIELD_NUMBER: _ClassVar[int]
    PIECES_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    OFFER_FIELD_NUMBER: _ClassVar[int]
    INVALIDATE_FIELD_NUMBER: _ClassVar[int]
    ERASE_FIELD_NUMBER: _ClassVar[int]
    HBM_QUERY_FIELD_NUMBER: _ClassVar[int]
    welcome: AttachWelcome
    found: LoadFound
    pieces: LoadPieces
    end: LoadEnd
    grant: SaveGrant
    offer: PrefetchOffer
    invalidate: _common_pb2.Session
    erase: Erase
    hbm_query: HbmQuery
    def __init__(self, welcome: _Optional[_Union[AttachWelcome, _Mapping]] = ..., found: _Optional[_Union[LoadFound, _Mapping]] = ..., pieces: _Optional[_Union[LoadPieces, _Mapping]] = ..., end: _Optional[_Union[LoadEnd, _Mapping]] = ..., grant: _Optional[_Union[SaveGrant, _Mapping]] = ..., offer: _Optional[_Union[PrefetchOffer, _Mapping]] = ..., invalidate: _Optional[_Union[_common_pb2.Session, _Mapping]] = ..., erase: _Optional[_Union[Erase, _Mapping]] = ..., hbm_query: _Optional[_Union[HbmQuery, _Mapping]] = ...) -> None: ...

class AttachWelcome(_message.Message):
    __slots__ = ("node", "arena_path", "arena_bytes", "nonce", "attachment")
    NODE_FIELD_NUMBER: _ClassVar[int]
    ARENA_PATH_FIELD_NUMBER: _ClassVar[int]
    ARENA_BYTES_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    ATTACHMENT_FIELD_NUMBER: _ClassVar[int]
    node: str
    arena_path: str
    arena_bytes: int
    nonce: bytes
    attachment: int
    def __init__(self, node: _Optional[str] = ..., arena_path: _Optional[str] = ..., arena_bytes: _Optional[int] = ..., nonce: _Optional[bytes] = ..., attachment: _Optional[int] = ...) -> None: ...

class LoadFound(_message.Message):
    __slots__ = ("load_id", "chunks", "near", "sources", "due_s")
    LOAD_ID_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    NEAR_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    DUE_S_FIELD_NUMBER: _ClassVar[int]
    load_id: int
    chunks: int
    near: bool
    sources: _containers.RepeatedScalarFieldContainer[int]
    due_s: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, load_id: _Optional[int] = ..., chunks: _Optional[int] = ..., near: _Optional[bool] = ..., sources: _Optional[_Iterable[int]] = ..., due_s: _Optional[_Iterable[float]] = ...) -> None: ...

class LoadPieces(_message.Message):
    __slots__ = ("load_id", "chunks", "layers", "offsets")
    LOAD_ID_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    load_id: int
    chunks: _containers.RepeatedScalarFieldContainer[int]
    layers: _containers.RepeatedScalarFieldContainer[int]
    offsets: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, load_id: _Optional[int] = ..., chunks: _Optional[_Iterable[int]] = ..., layers: _Optional[_Iterable[int]] = ..., offsets: _Optional[_Iterable[int]] = ...) -> None: ...

class LoadEnd(_message.Message):
    __slots__ = ("load_id", "usable")
    LOAD_ID_FIELD_NUMBER: _ClassVar[int]
    USABLE_FIELD_NUMBER: _ClassVar[int]
    load_id: int
    usable: int
    def __init__(self, load_id: _Optional[int] = ..., usable: _Optional[int] = ...) -> None: ...

class SaveGrant(_message.Message):
    __slots__ = ("save_id", "indices", "offsets", "held", "refused")
    SAVE_ID_FIELD_NUMBER: _ClassVar[int]
    INDICES_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    save_id: int
    indices: _containers.RepeatedScalarFieldContainer[int]
    offsets: _containers.RepeatedScalarFieldContainer[int]
    held: _containers.RepeatedScalarFieldContainer[int]
    refused: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, save_id: _Optional[int] = ..., indices: _Optional[_Iterable[int]] = ..., offsets: _Optional[_Iterable[int]] = ..., held: _Optional[_Iterable[int]] = ..., refused: _Optional[_Iterable[int]] = ...) -> None: ...

class PrefetchOffer(_message.Message):
    __slots__ = ("session", "fingerprint", "keys", "priority", "arrival_s", "expires_s", "note")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    ARRIVAL_S_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_S_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    session: _common_pb2.Session
    fingerprint: bytes
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    priority: int
    arrival_s: float
    expires_s: float
    note: bytes
    def __init__(self, session: _Optional[_Union[_common_pb2.Session, _Mapping]] = ..., fingerprint: _Optional[bytes] = ..., keys: _Optional[_Iterable[bytes]] = ..., priority: _Optional[int] = ..., arrival_s: _Optional[float] = ..., expires_s: _Optional[float] = ..., note: _Optional[bytes] = ...) -> None: ...

class Erase(_message.Message):
    __slots__ = ("keys", "sessions")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    sessions: _containers.RepeatedCompositeFieldContainer[_common_pb2.Session]
    def __init__(self, keys: _Optional[_Iterable[bytes]] = ..., sessions: _Optional[_Iterable[_Union[_common_pb2.Session, _Mapping]]] = ...) -> None: ...

class HbmQuery(_message.Message):
    __slots__ = ("query_id", "fingerprint", "keys")
    QUERY_ID_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    query_id: int
    fingerprint: bytes
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, query_id: _Optional[int] = ..., fingerprint: _Optional[bytes] = ..., keys: _Optional[_Iterable[bytes]] = ...) -> None: ...

class PeerCard(_message.Message):
    __slots__ = ("node", "instance", "nixl_metadata", "arena_base", "arena_bytes", "socket_address", "local_name")
    NODE_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    NIXL_METADATA_FIELD_NUMBER: _ClassVar[int]
    ARENA_BASE_FIELD_NUMBER: _ClassVar[int]
    ARENA_BYTES_FIELD_NUMBER: _ClassVar[int]
    SOCKET_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    LOCAL_NAME_FIELD_NUMBER: _ClassVar[int]
    node: str
    instance: str
    nixl_metadata: bytes
    arena_base: int
    arena_bytes: int
    socket_address: str
    local_name: str
    def __init__(self, node: _Optional[str] = ..., instance: _Optional[str] = ..., nixl_metadata: _Optional[bytes] = ..., arena_base: _Optional[int] = ..., arena_bytes: _Optional[int] = ..., socket_address: _Optional[str] = ..., local_name: _Optional[str] = ...) -> None: ...

class PeerLeaseRequest(_message.Message):
    __slots__ = ("lease_id", "fingerprint", "chunks", "reader")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    READER_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    fingerprint: bytes
    chunks: _containers.RepeatedCompositeFieldContainer[ChunkWant]
    reader: str
    def __init__(self, lease_id: _Optional[str] = ..., fingerprint: _Optional[bytes] = ..., chunks: _Optional[_Iterable[_Union[ChunkWant, _Mapping]]] = ..., reader: _Optional[str] = ...) -> None: ...

class PeerPieces(_message.Message):
    __slots__ = ("chunks", "layers", "offsets", "checksums", "held", "in_dram", "due_s")
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    IN_DRAM_FIELD_NUMBER: _ClassVar[int]
    DUE_S_FIELD_NUMBER: _ClassVar[int]
    chunks: _containers.RepeatedScalarFieldContainer[int]
    layers: _containers.RepeatedScalarFieldContainer[int]
    offsets: _containers.RepeatedScalarFieldContainer[int]
    checksums: _containers.RepeatedScalarFieldContainer[int]
    held: _containers.RepeatedScalarFieldContainer[int]
    in_dram: _containers.RepeatedScalarFieldContainer[int]
    due_s: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, chunks: _Optional[_Iterable[int]] = ..., layers: _Optional[_Iterable[int]] = ..., offsets: _Optional[_Iterable[int]] = ..., checksums: _Optional[_Iterable[int]] = ..., held: _Optional[_Iterable[int]] = ..., in_dram: _Optional[_Iterable[int]] = ..., due_s: _Optional[_Iterable[float]] = ...) -> None: ...

class PeerReleaseRequest(_message.Message):
    __slots__ = ("lease_id",)
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    def __init__(self, lease_id: _Optional[str] = ...) -> None: ...

class PeerReleaseReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResidencyRequest(_message.Message):
    __slots__ = ("session", "local")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    LOCAL_FIELD_NUMBER: _ClassVar[int]
    session: _common_pb2.Session
    local: bool
    def __init__(self, session: _Optional[_Union[_common_pb2.Session, _Mapping]] = ..., local: _Optional[bool] = ...) -> None: ...

class ResidencyReply(_message.Message):
    __slots__ = ("known", "manifest", "tiers")
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    known: bool
    manifest: _common_pb2.Manifest
    tiers: _containers.RepeatedCompositeFieldContainer[_common_pb2.TierResidency]
    def __init__(self, known: _Optional[bool] = ..., manifest: _Optional[_Union[_common_pb2.Manifest, _Mapping]] = ..., tiers: _Optional[_Iterable[_Union[_common_pb2.TierResidency, _Mapping]]] = ...) -> None: ...

class FlushRequest(_message.Message):
    __slots__ = ("timeout_s",)
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    timeout_s: float
    def __init__(self, timeout_s: _Optional[float] = ...) -> None: ...

class FlushReply(_message.Message):
    __slots__ = ("complete", "pending_bytes")
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    PENDING_BYTES_FIELD_NUMBER: _ClassVar[int]
    complete: bool
    pending_bytes: int
    def __init__(self, complete: _Optional[bool] = ..., pending_bytes: _Optional[int] = ...) -> None: ...
