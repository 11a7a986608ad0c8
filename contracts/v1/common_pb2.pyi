from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Session(_message.Message):
    __slots__ = ("tenant", "session_id")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    session_id: str
    def __init__(self, tenant: _Optional[str] = ..., session_id: _Optional[str] = ...) -> None: ...

class KvShape(_message.Message):
    __slots__ = ("fingerprint", "layers", "kv_heads", "head_dim", "chunk_tokens", "dtype", "piece_bytes", "windows")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    PIECE_BYTES_FIELD_NUMBER: _ClassVar[int]
    WINDOWS_FIELD_NUMBER: _ClassVar[int]
    fingerprint: bytes
    layers: int
    kv_heads: int
    head_dim: int
    chunk_tokens: int
    dtype: str
    piece_bytes: int
    windows: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, fingerprint: _Optional[bytes] = ..., layers: _Optional[int] = ..., kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., chunk_tokens: _Optional[int] = ..., dtype: _Optional[str] = ..., piece_bytes: _Optional[int] = ..., windows: _Optional[_Iterable[int]] = ...) -> None: ...

class Manifest(_message.Message):
    __slots__ = ("session", "model", "fingerprint", "keys", "tokens", "last_use_s", "note")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LAST_USE_S_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    session: Session
    model: str
    fingerprint: bytes
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    tokens: int
    last_use_s: float
    note: bytes
    def __init__(self, session: _Optional[_Union[Session, _Mapping]] = ..., model: _Optional[str] = ..., fingerprint: _Optional[bytes] = ..., keys: _Optional[_Iterable[bytes]] = ..., tokens: _Optional[int] = ..., last_use_s: _Optional[float] = ..., note: _Optional[bytes] = ...) -> None: ...

class Advisory(_message.Message):
    __slots__ = ("session", "model_id", "expected_arrival_s", "ordered", "priority", "ttl_s", "advisory_id", "pin_node", "caller", "trace")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_ARRIVAL_S_FIELD_NUMBER: _ClassVar[int]
    ORDERED_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    ADVISORY_ID_FIELD_NUMBER: _ClassVar[int]
    PIN_NODE_FIELD_NUMBER: _ClassVar[int]
    CALLER_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    session: Session
    model_id: str
    expected_arrival_s: float
    ordered: bool
    priority: int
    ttl_s: float
    advisory_id: str
    pin_node: str
    caller: str
    trace: str
    def __init__(self, session: _Optional[_Union[Session, _Mapping]] = ..., model_id: _Optional[str] = ..., expected_arrival_s: _Optional[float] = ..., ordered: _Optional[bool] = ..., priority: _Optional[int] = ..., ttl_s: _Optional[float] = ..., advisory_id: _Optional[str] = ..., pin_node: _Optional[str] = ..., caller: _Optional[str] = ..., trace: _Optional[str] = ...) -> None: ...

class TierResidency(_message.Message):
    __slots__ = ("tier", "layer_chunks", "tokens", "bytes")
    TIER_FIELD_NUMBER: _ClassVar[int]
    LAYER_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    tier: str
    layer_chunks: _containers.RepeatedScalarFieldContainer[int]
    tokens: int
    bytes: int
    def __init__(self, tier: _Optional[str] = ..., layer_chunks: _Optional[_Iterable[int]] = ..., tokens: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...
