from contracts.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ModelState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MODEL_STATE_UNKNOWN: _ClassVar[ModelState]
    MODEL_STATE_COLD: _ClassVar[ModelState]
    MODEL_STATE_LOADING: _ClassVar[ModelState]
    MODEL_STATE_ACTIVE: _ClassVar[ModelState]
    MODEL_STATE_DRAINING: _ClassVar[ModelState]

class ModelWire(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MODEL_WIRE_FRAMES: _ClassVar[ModelWire]
    MODEL_WIRE_HTTP: _ClassVar[ModelWire]
MODEL_STATE_UNKNOWN: ModelState
MODEL_STATE_COLD: ModelState
MODEL_STATE_LOADING: ModelState
MODEL_STATE_ACTIVE: ModelState
MODEL_STATE_DRAINING: ModelState
MODEL_WIRE_FRAMES: ModelWire
MODEL_WIRE_HTTP: ModelWire

class PlaceRequests(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[PlaceRequest]
    def __init__(self, requests: _Optional[_Iterable[_Union[PlaceRequest, _Mapping]]] = ...) -> None: ...

class PlaceAnswers(_message.Message):
    __slots__ = ("answers",)
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    answers: _containers.RepeatedCompositeFieldContainer[PlaceAnswer]
    def __init__(self, answers: _Optional[_Iterable[_Union[PlaceAnswer, _Mapping]]] = ...) -> None: ...

class PlaceAnswer(_message.Message):
    __slots__ = ("placed", "refused")
    PLACED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    placed: Placement
    refused: str
    def __init__(self, placed: _Optional[_Union[Placement, _Mapping]] = ..., refused: _Optional[str] = ...) -> None: ...

class PlaceRequest(_message.Message):
    __slots__ = ("request_id", "session", "model", "priority", "pin_node", "avoid_nodes", "taken", "hop", "trace")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    PIN_NODE_FIELD_NUMBER: _ClassVar[int]
    AVOID_NODES_FIELD_NUMBER: _ClassVar[int]
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    HOP_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    session: _common_pb2.Session
    model: str
    priority: int
    pin_node: str
    avoid_nodes: _containers.RepeatedScalarFieldContainer[str]
    taken: bool
    hop: Hop
    trace: str
    def __init__(self, request_id: _Optional[str] = ..., session: _Optional[_Union[_common_pb2.Session, _Mapping]] = ..., model: _Optional[str] = ..., priority: _Optional[int] = ..., pin_node: _Optional[str] = ..., avoid_nodes: _Optional[_Iterable[str]] = ..., taken: _Optional[bool] = ..., hop: _Optional[_Union[Hop, _Mapping]] = ..., trace: _Optional[str] = ...) -> None: ...

class Hop(_message.Message):
    __slots__ = ("workflow", "agent", "run", "ended")
    WORKFLOW_FIELD_NUMBER: _ClassVar[int]
    AGENT_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    workflow: str
    agent: str
    run: str
    ended: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, workflow: _Optional[str] = ..., agent: _Optional[str] = ..., run: _Optional[str] = ..., ended: _Optional[_Iterable[str]] = ...) -> None: ...

class Placement(_message.Message):
    __slots__ = ("node", "worker_address", "source_nodes", "advised", "why", "kept_tokens", "cold", "hint_trace")
    NODE_FIELD_NUMBER: _ClassVar[int]
    WORKER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_NODES_FIELD_NUMBER: _ClassVar[int]
    ADVISED_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    KEPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COLD_FIELD_NUMBER: _ClassVar[int]
    HINT_TRACE_FIELD_NUMBER: _ClassVar[int]
    node: str
    worker_address: str
    source_nodes: _containers.RepeatedScalarFieldContainer[str]
    advised: bool
    why: str
    kept_tokens: int
    cold: bool
    hint_trace: str
    def __init__(self, node: _Optional[str] = ..., worker_address: _Optional[str] = ..., source_nodes: _Optional[_Iterable[str]] = ..., advised: _Optional[bool] = ..., why: _Optional[str] = ..., kept_tokens: _Optional[int] = ..., cold: _Optional[bool] = ..., hint_trace: _Optional[str] = ...) -> None: ...

class AdviseRequest(_message.Message):
    __slots__ = ("advisories",)
    ADVISORIES_FIELD_NUMBER: _ClassVar[int]
    advisories: _containers.RepeatedCompositeFieldContainer[_common_pb2.Advisory]
    def __init__(self, advisories: _Optional[_Iterable[_Union[_common_pb2.Advisory, _Mapping]]] = ...) -> None: ...

class AdviseReply(_message.Message):
    __slots__ = ("nodes", "placements")
    NODES_FIELD_NUMBER: _ClassVar[int]
    PLACEMENTS_FIELD_NUMBER: _ClassVar[int]
    nodes: _containers.RepeatedScalarFieldContainer[str]
    placements: _containers.RepeatedCompositeFieldContainer[Placement]
    def __init__(self, nodes: _Optional[_Iterable[str]] = ..., placements: _Optional[_Iterable[_Union[Placement, _Mapping]]] = ...) -> None: ...

class InvalidateRequest(_message.Message):
    __slots__ = ("session", "advisory_id")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    ADVISORY_ID_FIELD_NUMBER: _ClassVar[int]
    session: _common_pb2.Session
    advisory_id: str
    def __init__(self, session: _Optional[_Union[_common_pb2.Session, _Mapping]] = ..., advisory_id: _Optional[str] = ...) -> None: ...

class InvalidateReply(_message.Message):
    __slots__ = ("known",)
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    known: bool
    def __init__(self, known: _Optional[bool] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Fleet(_message.Message):
    __slots__ = ("nodes", "expected_nodes", "gathering", "members")
    NODES_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_NODES_FIELD_NUMBER: _ClassVar[int]
    GATHERING_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    nodes: _containers.RepeatedCompositeFieldContainer[FleetNode]
    expected_nodes: int
    gathering: bool
    members: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, nodes: _Optional[_Iterable[_Union[FleetNode, _Mapping]]] = ..., expected_nodes: _Optional[int] = ..., gathering: _Optional[bool] = ..., members: _Optional[_Iterable[str]] = ...) -> None: ...

class FleetNode(_message.Message):
    __slots__ = ("node", "worker_address", "store_address", "serving", "models", "running", "waiting", "outstanding_tokens", "advised", "hbm_pages_total", "hbm_pages_free", "dram_bytes_total", "dram_bytes_used", "ssd_bytes_used", "sessions", "state", "stalled", "loads", "device_bytes", "device_bytes_free", "hbm_pages_cached", "memory")
    NODE_FIELD_NUMBER: _ClassVar[int]
    WORKER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STORE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SERVING_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    OUTSTANDING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ADVISED_FIELD_NUMBER: _ClassVar[int]
    HBM_PAGES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    HBM_PAGES_FREE_FIELD_NUMBER: _ClassVar[int]
    DRAM_BYTES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    DRAM_BYTES_USED_FIELD_NUMBER: _ClassVar[int]
    SSD_BYTES_USED_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    STALLED_FIELD_NUMBER: _ClassVar[int]
    LOADS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_BYTES_FREE_FIELD_NUMBER: _ClassVar[int]
    HBM_PAGES_CACHED_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    node: str
    worker_address: str
    store_address: str
    serving: bool
    models: _containers.RepeatedCompositeFieldContainer[ModelInfo]
    running: int
    waiting: int
    outstanding_tokens: float
    advised: int
    hbm_pages_total: int
    hbm_pages_free: int
    dram_bytes_total: int
    dram_bytes_used: int
    ssd_bytes_used: int
    sessions: int
    state: str
    stalled: str
    loads: _containers.RepeatedCompositeFieldContainer[ModelLoad]
    device_bytes: int
    device_bytes_free: int
    hbm_pages_cached: int
    memory: _containers.RepeatedCompositeFieldContainer[MemoryShare]
    def __init__(self, node: _Optional[str] = ..., worker_address: _Optional[str] = ..., store_address: _Optional[str] = ..., serving: _Optional[bool] = ..., models: _Optional[_Iterable[_Union[ModelInfo, _Mapping]]] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., outstanding_tokens: _Optional[float] = ..., advised: _Optional[int] = ..., hbm_pages_total: _Optional[int] = ..., hbm_pages_free: _Optional[int] = ..., dram_bytes_total: _Optional[int] = ..., dram_bytes_used: _Optional[int] = ..., ssd_bytes_used: _Optional[int] = ..., sessions: _Optional[int] = ..., state: _Optional[str] = ..., stalled: _Optional[str] = ..., loads: _Optional[_Iterable[_Union[ModelLoad, _Mapping]]] = ..., device_bytes: _Optional[int] = ..., device_bytes_free: _Optional[int] = ..., hbm_pages_cached: _Optional[int] = ..., memory: _Optional[_Iterable[_Union[MemoryShare, _Mapping]]] = ...) -> None: ...

class ModelInfo(_message.Message):
    __slots__ = ("name", "shape", "max_tokens", "created_s", "longest_token_bytes", "message_token_bytes", "state", "weight_bytes", "ttft_slo_s", "tpot_slo_s", "engine", "wire")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CREATED_S_FIELD_NUMBER: _ClassVar[int]
    LONGEST_TOKEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_TOKEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    TTFT_SLO_S_FIELD_NUMBER: _ClassVar[int]
    TPOT_SLO_S_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    WIRE_FIELD_NUMBER: _ClassVar[int]
    name: str
    shape: _common_pb2.KvShape
    max_tokens: int
    created_s: int
    longest_token_bytes: int
    message_token_bytes: int
    state: ModelState
    weight_bytes: int
    ttft_slo_s: float
    tpot_slo_s: float
    engine: str
    wire: ModelWire
    def __init__(self, name: _Optional[str] = ..., shape: _Optional[_Union[_common_pb2.KvShape, _Mapping]] = ..., max_tokens: _Optional[int] = ..., created_s: _Optional[int] = ..., longest_token_bytes: _Optional[int] = ..., message_token_bytes: _Optional[int] = ..., state: _Optional[_Union[ModelState, str]] = ..., weight_bytes: _Optional[int] = ..., ttft_slo_s: _Optional[float] = ..., tpot_slo_s: _Optional[float] = ..., engine: _Optional[str] = ..., wire: _Optional[_Union[ModelWire, str]] = ...) -> None: ...

class ModelLoad(_message.Message):
    __slots__ = ("model", "state", "running", "waiting", "outstanding_tokens", "outstanding_by_priority", "request_s", "prefill_token_s", "token_rate", "kv_bytes_used", "kv_bytes_limit", "layers_lent", "idle_s", "activation_s", "kv_bytes_cached", "may_lend")
    class OutstandingByPriorityEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    MODEL_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    OUTSTANDING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTSTANDING_BY_PRIORITY_FIELD_NUMBER: _ClassVar[int]
    REQUEST_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    TOKEN_RATE_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_USED_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_LIMIT_FIELD_NUMBER: _ClassVar[int]
    LAYERS_LENT_FIELD_NUMBER: _ClassVar[int]
    IDLE_S_FIELD_NUMBER: _ClassVar[int]
    ACTIVATION_S_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_CACHED_FIELD_NUMBER: _ClassVar[int]
    MAY_LEND_FIELD_NUMBER: _ClassVar[int]
    model: str
    state: ModelState
    running: int
    waiting: int
    outstanding_tokens: float
    outstanding_by_priority: _containers.ScalarMap[int, float]
    request_s: float
    prefill_token_s: float
    token_rate: float
    kv_bytes_used: int
    kv_bytes_limit: int
    layers_lent: int
    idle_s: float
    activation_s: float
    kv_bytes_cached: int
    may_lend: MayLend
    def __init__(self, model: _Optional[str] = ..., state: _Optional[_Union[ModelState, str]] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., outstanding_tokens: _Optional[float] = ..., outstanding_by_priority: _Optional[_Mapping[int, float]] = ..., request_s: _Optional[float] = ..., prefill_token_s: _Optional[float] = ..., token_rate: _Optional[float] = ..., kv_bytes_used: _Optional[int] = ..., kv_bytes_limit: _Optional[int] = ..., layers_lent: _Optional[int] = ..., idle_s: _Optional[float] = ..., activation_s: _Optional[float] = ..., kv_bytes_cached: _Optional[int] = ..., may_lend: _Optional[_Union[MayLend, _Mapping]] = ...) -> None: ...

class MayLend(_message.Message):
    __slots__ = ("idle", "computing", "transfer_s", "layer_s", "never")
    IDLE_FIELD_NUMBER: _ClassVar[int]
    COMPUTING_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_S_FIELD_NUMBER: _ClassVar[int]
    LAYER_S_FIELD_NUMBER: _ClassVar[int]
    NEVER_FIELD_NUMBER: _ClassVar[int]
    idle: int
    computing: int
    transfer_s: float
    layer_s: float
    never: str
    def __init__(self, idle: _Optional[int] = ..., computing: _Optional[int] = ..., transfer_s: _Optional[float] = ..., layer_s: _Optional[float] = ..., never: _Optional[str] = ...) -> None: ...

class SloDecidedRequest(_message.Message):
    __slots__ = ("decided",)
    DECIDED_FIELD_NUMBER: _ClassVar[int]
    decided: _containers.RepeatedCompositeFieldContainer[SloDecided]
    def __init__(self, decided: _Optional[_Iterable[_Union[SloDecided, _Mapping]]] = ...) -> None: ...

class SloDecided(_message.Message):
    __slots__ = ("model", "target", "turns", "kept")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    TURNS_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    model: str
    target: str
    turns: int
    kept: int
    def __init__(self, model: _Optional[str] = ..., target: _Optional[str] = ..., turns: _Optional[int] = ..., kept: _Optional[int] = ...) -> None: ...

class SloDecidedReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ScaleRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ScaleReply(_message.Message):
    __slots__ = ("desired_nodes", "wanted_nodes", "why", "demand_devices", "utilisation", "nodes", "starting_nodes", "devices", "arriving", "work_s", "hbm_needed", "dram_needed", "attainment", "turns", "unmeasured_devices", "incomplete", "models", "work_by_device", "min_nodes", "max_nodes", "target_utilisation")
    class ModelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: ModelScale
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[ModelScale, _Mapping]] = ...) -> None: ...
    class WorkByDeviceEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    DESIRED_NODES_FIELD_NUMBER: _ClassVar[int]
    WANTED_NODES_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    DEMAND_DEVICES_FIELD_NUMBER: _ClassVar[int]
    UTILISATION_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    STARTING_NODES_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    ARRIVING_FIELD_NUMBER: _ClassVar[int]
    WORK_S_FIELD_NUMBER: _ClassVar[int]
    HBM_NEEDED_FIELD_NUMBER: _ClassVar[int]
    DRAM_NEEDED_FIELD_NUMBER: _ClassVar[int]
    ATTAINMENT_FIELD_NUMBER: _ClassVar[int]
    TURNS_FIELD_NUMBER: _ClassVar[int]
    UNMEASURED_DEVICES_FIELD_NUMBER: _ClassVar[int]
    INCOMPLETE_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    WORK_BY_DEVICE_FIELD_NUMBER: _ClassVar[int]
    MIN_NODES_FIELD_NUMBER: _ClassVar[int]
    MAX_NODES_FIELD_NUMBER: _ClassVar[int]
    TARGET_UTILISATION_FIELD_NUMBER: _ClassVar[int]
    desired_nodes: int
    wanted_nodes: int
    why: str
    demand_devices: float
    utilisation: float
    nodes: int
    starting_nodes: int
    devices: int
    arriving: float
    work_s: float
    hbm_needed: float
    dram_needed: float
    attainment: float
    turns: int
    unmeasured_devices: int
    incomplete: str
    models: _containers.MessageMap[str, ModelScale]
    work_by_device: _containers.ScalarMap[str, float]
    min_nodes: int
    max_nodes: int
    target_utilisation: float
    def __init__(self, desired_nodes: _Optional[int] = ..., wanted_nodes: _Optional[int] = ..., why: _Optional[str] = ..., demand_devices: _Optional[float] = ..., utilisation: _Optional[float] = ..., nodes: _Optional[int] = ..., starting_nodes: _Optional[int] = ..., devices: _Optional[int] = ..., arriving: _Optional[float] = ..., work_s: _Optional[float] = ..., hbm_needed: _Optional[float] = ..., dram_needed: _Optional[float] = ..., attainment: _Optional[float] = ..., turns: _Optional[int] = ..., unmeasured_devices: _Optional[int] = ..., incomplete: _Optional[str] = ..., models: _Optional[_Mapping[str, ModelScale]] = ..., work_by_device: _Optional[_Mapping[str, float]] = ..., min_nodes: _Optional[int] = ..., max_nodes: _Optional[int] = ..., target_utilisation: _Optional[float] = ...) -> None: ...

class ModelScale(_message.Message):
    __slots__ = ("work_s", "arriving", "nodes", "attainment", "turns")
    class AttainmentEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class TurnsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    WORK_S_FIELD_NUMBER: _ClassVar[int]
    ARRIVING_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    ATTAINMENT_FIELD_NUMBER: _ClassVar[int]
    TURNS_FIELD_NUMBER: _ClassVar[int]
    work_s: float
    arriving: float
    nodes: int
    attainment: _containers.ScalarMap[str, float]
    turns: _containers.ScalarMap[str, int]
    def __init__(self, work_s: _Optional[float] = ..., arriving: _Optional[float] = ..., nodes: _Optional[int] = ..., attainment: _Optional[_Mapping[str, float]] = ..., turns: _Optional[_Mapping[str, int]] = ...) -> None: ...

class MetricsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FleetMetrics(_message.Message):
    __slots__ = ("nodes",)
    class NodesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: ProcessMetrics
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[ProcessMetrics, _Mapping]] = ...) -> None: ...
    NODES_FIELD_NUMBER: _ClassVar[int]
    nodes: _containers.MessageMap[str, ProcessMetrics]
    def __init__(self, nodes: _Optional[_Mapping[str, ProcessMetrics]] = ...) -> None: ...

class ProcessMetrics(_message.Message):
    __slots__ = ("samples",)
    class SamplesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    samples: _containers.ScalarMap[str, float]
    def __init__(self, samples: _Optional[_Mapping[str, float]] = ...) -> None: ...

class WorkerReport(_message.Message):
    __slots__ = ("hello", "load", "metrics", "moves", "finetunes")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    MOVES_FIELD_NUMBER: _ClassVar[int]
    FINETUNES_FIELD_NUMBER: _ClassVar[int]
    hello: WorkerHello
    load: WorkerLoad
    metrics: ProcessMetrics
    moves: WeightsMoves
    finetunes: FinetuneReport
    def __init__(self, hello: _Optional[_Union[WorkerHello, _Mapping]] = ..., load: _Optional[_Union[WorkerLoad, _Mapping]] = ..., metrics: _Optional[_Union[ProcessMetrics, _Mapping]] = ..., moves: _Optional[_Union[WeightsMoves, _Mapping]] = ..., finetunes: _Optional[_Union[FinetuneReport, _Mapping]] = ...) -> None: ...

class WeightsMoves(_message.Message):
    __slots__ = ("moves",)
    MOVES_FIELD_NUMBER: _ClassVar[int]
    moves: _containers.RepeatedCompositeFieldContainer[WeightsMove]
    def __init__(self, moves: _Optional[_Iterable[_Union[WeightsMove, _Mapping]]] = ...) -> None: ...

class WeightsMove(_message.Message):
    __slots__ = ("model", "ago_s", "state", "why", "other", "seconds", "layers_lent")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    AGO_S_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    OTHER_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    LAYERS_LENT_FIELD_NUMBER: _ClassVar[int]
    model: str
    ago_s: float
    state: ModelState
    why: str
    other: str
    seconds: float
    layers_lent: int
    def __init__(self, model: _Optional[str] = ..., ago_s: _Optional[float] = ..., state: _Optional[_Union[ModelState, str]] = ..., why: _Optional[str] = ..., other: _Optional[str] = ..., seconds: _Optional[float] = ..., layers_lent: _Optional[int] = ...) -> None: ...

class WorkerHello(_message.Message):
    __slots__ = ("node", "address", "models", "instance", "connection", "peer_bytes_per_s", "ssd_bytes_per_s", "blob_bytes_per_s", "device_bytes", "device", "devices", "left_out")
    class LeftOutEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NODE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    CONNECTION_FIELD_NUMBER: _ClassVar[int]
    PEER_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    SSD_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    BLOB_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    DEVICE_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    node: str
    address: str
    models: _containers.RepeatedCompositeFieldContainer[ModelInfo]
    instance: str
    connection: int
    peer_bytes_per_s: float
    ssd_bytes_per_s: float
    blob_bytes_per_s: float
    device_bytes: int
    device: int
    devices: int
    left_out: _containers.ScalarMap[str, str]
    def __init__(self, node: _Optional[str] = ..., address: _Optional[str] = ..., models: _Optional[_Iterable[_Union[ModelInfo, _Mapping]]] = ..., instance: _Optional[str] = ..., connection: _Optional[int] = ..., peer_bytes_per_s: _Optional[float] = ..., ssd_bytes_per_s: _Optional[float] = ..., blob_bytes_per_s: _Optional[float] = ..., device_bytes: _Optional[int] = ..., device: _Optional[int] = ..., devices: _Optional[int] = ..., left_out: _Optional[_Mapping[str, str]] = ...) -> None: ...

class WorkerLoad(_message.Message):
    __slots__ = ("running", "waiting", "outstanding_tokens", "hbm_pages_total", "hbm_pages_free", "in_flight", "finished", "outstanding_s", "request_s", "prefill_token_s", "outstanding_by_priority", "number", "draining", "stalled_s", "models", "device_bytes_free", "hbm_pages_cached", "memory")
    class OutstandingByPriorityEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    OUTSTANDING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HBM_PAGES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    HBM_PAGES_FREE_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    OUTSTANDING_S_FIELD_NUMBER: _ClassVar[int]
    REQUEST_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    OUTSTANDING_BY_PRIORITY_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    STALLED_S_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_BYTES_FREE_FIELD_NUMBER: _ClassVar[int]
    HBM_PAGES_CACHED_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    running: int
    waiting: int
    outstanding_tokens: float
    hbm_pages_total: int
    hbm_pages_free: int
    in_flight: _containers.RepeatedScalarFieldContainer[str]
    finished: _containers.RepeatedScalarFieldContainer[str]
    outstanding_s: float
    request_s: float
    prefill_token_s: float
    outstanding_by_priority: _containers.ScalarMap[int, float]
    number: int
    draining: bool
    stalled_s: float
    models: _containers.RepeatedCompositeFieldContainer[ModelLoad]
    device_bytes_free: int
    hbm_pages_cached: int
    memory: _containers.RepeatedCompositeFieldContainer[MemoryShare]
    def __init__(self, running: _Optional[int] = ..., waiting: _Optional[int] = ..., outstanding_tokens: _Optional[float] = ..., hbm_pages_total: _Optional[int] = ..., hbm_pages_free: _Optional[int] = ..., in_flight: _Optional[_Iterable[str]] = ..., finished: _Optional[_Iterable[str]] = ..., outstanding_s: _Optional[float] = ..., request_s: _Optional[float] = ..., prefill_token_s: _Optional[float] = ..., outstanding_by_priority: _Optional[_Mapping[int, float]] = ..., number: _Optional[int] = ..., draining: _Optional[bool] = ..., stalled_s: _Optional[float] = ..., models: _Optional[_Iterable[_Union[ModelLoad, _Mapping]]] = ..., device_bytes_free: _Optional[int] = ..., hbm_pages_cached: _Optional[int] = ..., memory: _Optional[_Iterable[_Union[MemoryShare, _Mapping]]] = ...) -> None: ...

class MemoryShare(_message.Message):
    __slots__ = ("use", "name", "bytes")
    USE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    use: str
    name: str
    bytes: int
    def __init__(self, use: _Optional[str] = ..., name: _Optional[str] = ..., bytes: _Optional[int] = ...) -> None: ...

class WorkerCommand(_message.Message):
    __slots__ = ("leave", "report_every_s", "wake", "spare", "finetune", "restart")
    LEAVE_FIELD_NUMBER: _ClassVar[int]
    REPORT_EVERY_S_FIELD_NUMBER: _ClassVar[int]
    WAKE_FIELD_NUMBER: _ClassVar[int]
    SPARE_FIELD_NUMBER: _ClassVar[int]
    FINETUNE_FIELD_NUMBER: _ClassVar[int]
    RESTART_FIELD_NUMBER: _ClassVar[int]
    leave: bool
    report_every_s: float
    wake: WakeModel
    spare: SpareModel
    finetune: FinetuneCommand
    restart: RestartWorker
    def __init__(self, leave: _Optional[bool] = ..., report_every_s: _Optional[float] = ..., wake: _Optional[_Union[WakeModel, _Mapping]] = ..., spare: _Optional[_Union[SpareModel, _Mapping]] = ..., finetune: _Optional[_Union[FinetuneCommand, _Mapping]] = ..., restart: _Optional[_Union[RestartWorker, _Mapping]] = ...) -> None: ...

class RestartWorker(_message.Message):
    __slots__ = ("instance",)
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    instance: str
    def __init__(self, instance: _Optional[str] = ...) -> None: ...

class FinetuneReport(_message.Message):
    __slots__ = ("spare", "refuses", "jobs")
    SPARE_FIELD_NUMBER: _ClassVar[int]
    REFUSES_FIELD_NUMBER: _ClassVar[int]
    JOBS_FIELD_NUMBER: _ClassVar[int]
    spare: float
    refuses: str
    jobs: _containers.RepeatedCompositeFieldContainer[FinetuneProgress]
    def __init__(self, spare: _Optional[float] = ..., refuses: _Optional[str] = ..., jobs: _Optional[_Iterable[_Union[FinetuneProgress, _Mapping]]] = ...) -> None: ...

class FinetuneCommand(_message.Message):
    __slots__ = ("start", "stop")
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    start: FinetuneJob
    stop: StopFinetune
    def __init__(self, start: _Optional[_Union[FinetuneJob, _Mapping]] = ..., stop: _Optional[_Union[StopFinetune, _Mapping]] = ...) -> None: ...

class StopFinetune(_message.Message):
    __slots__ = ("id", "cancelled")
    ID_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    id: str
    cancelled: bool
    def __init__(self, id: _Optional[str] = ..., cancelled: _Optional[bool] = ...) -> None: ...

class WakeModel(_message.Message):
    __slots__ = ("model", "arrival_s", "expires_s", "moves")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ARRIVAL_S_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_S_FIELD_NUMBER: _ClassVar[int]
    MOVES_FIELD_NUMBER: _ClassVar[int]
    model: str
    arrival_s: float
    expires_s: float
    moves: bool
    def __init__(self, model: _Optional[str] = ..., arrival_s: _Optional[float] = ..., expires_s: _Optional[float] = ..., moves: _Optional[bool] = ...) -> None: ...

class SpareModel(_message.Message):
    __slots__ = ("model", "expires_s")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_S_FIELD_NUMBER: _ClassVar[int]
    model: str
    expires_s: float
    def __init__(self, model: _Optional[str] = ..., expires_s: _Optional[float] = ...) -> None: ...

class StoreReport(_message.Message):
    __slots__ = ("hello", "held", "load", "metrics", "erased", "leaving")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    ERASED_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    hello: StoreHello
    held: HeldSessions
    load: StoreLoad
    metrics: ProcessMetrics
    erased: Erased
    leaving: StoreLeaving
    def __init__(self, hello: _Optional[_Union[StoreHello, _Mapping]] = ..., held: _Optional[_Union[HeldSessions, _Mapping]] = ..., load: _Optional[_Union[StoreLoad, _Mapping]] = ..., metrics: _Optional[_Union[ProcessMetrics, _Mapping]] = ..., erased: _Optional[_Union[Erased, _Mapping]] = ..., leaving: _Optional[_Union[StoreLeaving, _Mapping]] = ...) -> None: ...

class StoreLeaving(_message.Message):
    __slots__ = ("over", "waits_for", "pending_bytes")
    OVER_FIELD_NUMBER: _ClassVar[int]
    WAITS_FOR_FIELD_NUMBER: _ClassVar[int]
    PENDING_BYTES_FIELD_NUMBER: _ClassVar[int]
    over: bool
    waits_for: str
    pending_bytes: int
    def __init__(self, over: _Optional[bool] = ..., waits_for: _Optional[str] = ..., pending_bytes: _Optional[int] = ...) -> None: ...

class StoreHello(_message.Message):
    __slots__ = ("node", "address", "instance", "connection", "devices")
    NODE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    CONNECTION_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    node: str
    address: str
    instance: str
    connection: int
    devices: int
    def __init__(self, node: _Optional[str] = ..., address: _Optional[str] = ..., instance: _Optional[str] = ..., connection: _Optional[int] = ..., devices: _Optional[int] = ...) -> None: ...

class HeldSessions(_message.Message):
    __slots__ = ("full", "sessions", "number", "joining")
    FULL_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    JOINING_FIELD_NUMBER: _ClassVar[int]
    full: bool
    sessions: _containers.RepeatedCompositeFieldContainer[Held]
    number: int
    joining: bool
    def __init__(self, full: _Optional[bool] = ..., sessions: _Optional[_Iterable[_Union[Held, _Mapping]]] = ..., number: _Optional[int] = ..., joining: _Optional[bool] = ...) -> None: ...

class Held(_message.Message):
    __slots__ = ("session", "model", "tokens_total", "tokens_here", "bytes_here", "last_use_s", "tokens_dram")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TOKENS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    TOKENS_HERE_FIELD_NUMBER: _ClassVar[int]
    BYTES_HERE_FIELD_NUMBER: _ClassVar[int]
    LAST_USE_S_FIELD_NUMBER: _ClassVar[int]
    TOKENS_DRAM_FIELD_NUMBER: _ClassVar[int]
    session: _common_pb2.Session
    model: str
    tokens_total: int
    tokens_here: int
    bytes_here: int
    last_use_s: float
    tokens_dram: int
    def __init__(self, session: _Optional[_Union[_common_pb2.Session, _Mapping]] = ..., model: _Optional[str] = ..., tokens_total: _Optional[int] = ..., tokens_here: _Optional[int] = ..., bytes_here: _Optional[int] = ..., last_use_s: _Optional[float] = ..., tokens_dram: _Optional[int] = ...) -> None: ...

class StoreLoad(_message.Message):
    __slots__ = ("dram_bytes_total", "dram_bytes_used", "ssd_bytes_used")
    DRAM_BYTES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    DRAM_BYTES_USED_FIELD_NUMBER: _ClassVar[int]
    SSD_BYTES_USED_FIELD_NUMBER: _ClassVar[int]
    dram_bytes_total: int
    dram_bytes_used: int
    ssd_bytes_used: int
    def __init__(self, dram_bytes_total: _Optional[int] = ..., dram_bytes_used: _Optional[int] = ..., ssd_bytes_used: _Optional[int] = ...) -> None: ...

class Erased(_message.Message):
    __slots__ = ("session", "verified", "known", "left", "number", "taken")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    session: _common_pb2.Session
    verified: bool
    known: bool
    left: _containers.RepeatedCompositeFieldContainer[TierLeft]
    number: int
    taken: bool
    def __init__(self, session: _Optional[_Union[_common_pb2.Session, _Mapping]] = ..., verified: _Optional[bool] = ..., known: _Optional[bool] = ..., left: _Optional[_Iterable[_Union[TierLeft, _Mapping]]] = ..., number: _Optional[int] = ..., taken: _Optional[bool] = ...) -> None: ...

class TierLeft(_message.Message):
    __slots__ = ("tier", "chunks")
    TIER_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    tier: str
    chunks: int
    def __init__(self, tier: _Optional[str] = ..., chunks: _Optional[int] = ...) -> None: ...

class StoreCommand(_message.Message):
    __slots__ = ("prefetch", "invalidate", "erase", "peers", "erase_again", "leave")
    PREFETCH_FIELD_NUMBER: _ClassVar[int]
    INVALIDATE_FIELD_NUMBER: _ClassVar[int]
    ERASE_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    ERASE_AGAIN_FIELD_NUMBER: _ClassVar[int]
    LEAVE_FIELD_NUMBER: _ClassVar[int]
    prefetch: PrefetchCommand
    invalidate: _common_pb2.Session
    erase: _common_pb2.Session
    peers: FleetPeers
    erase_again: EraseAgain
    leave: bool
    def __init__(self, prefetch: _Optional[_Union[PrefetchCommand, _Mapping]] = ..., invalidate: _Optional[_Union[_common_pb2.Session, _Mapping]] = ..., erase: _Optional[_Union[_common_pb2.Session, _Mapping]] = ..., peers: _Optional[_Union[FleetPeers, _Mapping]] = ..., erase_again: _Optional[_Union[EraseAgain, _Mapping]] = ..., leave: _Optional[bool] = ...) -> None: ...

class EraseAgain(_message.Message):
    __slots__ = ("session", "number")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    session: _common_pb2.Session
    number: int
    def __init__(self, session: _Optional[_Union[_common_pb2.Session, _Mapping]] = ..., number: _Optional[int] = ...) -> None: ...

class PrefetchCommand(_message.Message):
    __slots__ = ("advisory", "source_nodes", "device")
    ADVISORY_FIELD_NUMBER: _ClassVar[int]
    SOURCE_NODES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    advisory: _common_pb2.Advisory
    source_nodes: _containers.RepeatedScalarFieldContainer[str]
    device: int
    def __init__(self, advisory: _Optional[_Union[_common_pb2.Advisory, _Mapping]] = ..., source_nodes: _Optional[_Iterable[str]] = ..., device: _Optional[int] = ...) -> None: ...

class FleetPeers(_message.Message):
    __slots__ = ("addresses", "members", "gone")
    class AddressesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    GONE_FIELD_NUMBER: _ClassVar[int]
    addresses: _containers.ScalarMap[str, str]
    members: _containers.RepeatedScalarFieldContainer[str]
    gone: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, addresses: _Optional[_Mapping[str, str]] = ..., members: _Optional[_Iterable[str]] = ..., gone: _Optional[_Iterable[str]] = ...) -> None: ...

class ListSessionsRequest(_message.Message):
    __slots__ = ("tenant", "limit", "after", "by_id")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    BY_ID_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    limit: int
    after: str
    by_id: bool
    def __init__(self, tenant: _Optional[str] = ..., limit: _Optional[int] = ..., after: _Optional[str] = ..., by_id: _Optional[bool] = ...) -> None: ...

class ListSessionsReply(_message.Message):
    __slots__ = ("sessions", "more", "unknown_after")
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_AFTER_FIELD_NUMBER: _ClassVar[int]
    sessions: _containers.RepeatedCompositeFieldContainer[SessionSummary]
    more: bool
    unknown_after: bool
    def __init__(self, sessions: _Optional[_Iterable[_Union[SessionSummary, _Mapping]]] = ..., more: _Optional[bool] = ..., unknown_after: _Optional[bool] = ...) -> None: ...

class SessionSummary(_message.Message):
    __slots__ = ("session", "model", "tokens", "last_use_s", "node", "held_by")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LAST_USE_S_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    HELD_BY_FIELD_NUMBER: _ClassVar[int]
    session: _common_pb2.Session
    model: str
    tokens: int
    last_use_s: float
    node: str
    held_by: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, session: _Optional[_Union[_common_pb2.Session, _Mapping]] = ..., model: _Optional[str] = ..., tokens: _Optional[int] = ..., last_use_s: _Optional[float] = ..., node: _Optional[str] = ..., held_by: _Optional[_Iterable[str]] = ...) -> None: ...

class GetSessionRequest(_message.Message):
    __slots__ = ("session", "local")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    LOCAL_FIELD_NUMBER: _ClassVar[int]
    session: _common_pb2.Session
    local: bool
    def __init__(self, session: _Optional[_Union[_common_pb2.Session, _Mapping]] = ..., local: _Optional[bool] = ...) -> None: ...

class SessionInfo(_message.Message):
    __slots__ = ("summary", "known", "nodes", "erasing", "erasures")
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    ERASING_FIELD_NUMBER: _ClassVar[int]
    ERASURES_FIELD_NUMBER: _ClassVar[int]
    summary: SessionSummary
    known: bool
    nodes: _containers.RepeatedCompositeFieldContainer[NodeResidency]
    erasing: bool
    erasures: _containers.RepeatedCompositeFieldContainer[NodeErasure]
    def __init__(self, summary: _Optional[_Union[SessionSummary, _Mapping]] = ..., known: _Optional[bool] = ..., nodes: _Optional[_Iterable[_Union[NodeResidency, _Mapping]]] = ..., erasing: _Optional[bool] = ..., erasures: _Optional[_Iterable[_Union[NodeErasure, _Mapping]]] = ...) -> None: ...

class NodeResidency(_message.Message):
    __slots__ = ("node", "tiers")
    NODE_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    node: str
    tiers: _containers.RepeatedCompositeFieldContainer[_common_pb2.TierResidency]
    def __init__(self, node: _Optional[str] = ..., tiers: _Optional[_Iterable[_Union[_common_pb2.TierResidency, _Mapping]]] = ...) -> None: ...

class EraseSessionRequest(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: _common_pb2.Session
    def __init__(self, session: _Optional[_Union[_common_pb2.Session, _Mapping]] = ...) -> None: ...

class EraseSessionReply(_message.Message):
    __slots__ = ("known", "nodes", "verified", "erasures", "taken")
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_FIELD_NUMBER: _ClassVar[int]
    ERASURES_FIELD_NUMBER: _ClassVar[int]
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    known: bool
    nodes: _containers.RepeatedScalarFieldContainer[str]
    verified: bool
    erasures: _containers.RepeatedCompositeFieldContainer[NodeErasure]
    taken: bool
    def __init__(self, known: _Optional[bool] = ..., nodes: _Optional[_Iterable[str]] = ..., verified: _Optional[bool] = ..., erasures: _Optional[_Iterable[_Union[NodeErasure, _Mapping]]] = ..., taken: _Optional[bool] = ...) -> None: ...

class NodeErasure(_message.Message):
    __slots__ = ("node", "answered", "verified", "left")
    NODE_FIELD_NUMBER: _ClassVar[int]
    ANSWERED_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    node: str
    answered: bool
    verified: bool
    left: _containers.RepeatedCompositeFieldContainer[TierLeft]
    def __init__(self, node: _Optional[str] = ..., answered: _Optional[bool] = ..., verified: _Optional[bool] = ..., left: _Optional[_Iterable[_Union[TierLeft, _Mapping]]] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: _common_pb2.Session
    def __init__(self, session: _Optional[_Union[_common_pb2.Session, _Mapping]] = ...) -> None: ...

class Explanation(_message.Message):
    __slots__ = ("decisions",)
    DECISIONS_FIELD_NUMBER: _ClassVar[int]
    decisions: _containers.RepeatedCompositeFieldContainer[Decision]
    def __init__(self, decisions: _Optional[_Iterable[_Union[Decision, _Mapping]]] = ...) -> None: ...

class Decision(_message.Message):
    __slots__ = ("what", "ago_s", "node", "request_id", "hinted", "prefetched_node", "prefetched_s", "moves", "pin_node", "avoided", "source_nodes", "worth", "scores", "taken", "until_first_s", "after_s")
    class UntilFirstSEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class AfterSEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    WHAT_FIELD_NUMBER: _ClassVar[int]
    AGO_S_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    HINTED_FIELD_NUMBER: _ClassVar[int]
    PREFETCHED_NODE_FIELD_NUMBER: _ClassVar[int]
    PREFETCHED_S_FIELD_NUMBER: _ClassVar[int]
    MOVES_FIELD_NUMBER: _ClassVar[int]
    PIN_NODE_FIELD_NUMBER: _ClassVar[int]
    AVOIDED_FIELD_NUMBER: _ClassVar[int]
    SOURCE_NODES_FIELD_NUMBER: _ClassVar[int]
    WORTH_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    UNTIL_FIRST_S_FIELD_NUMBER: _ClassVar[int]
    AFTER_S_FIELD_NUMBER: _ClassVar[int]
    what: str
    ago_s: float
    node: str
    request_id: str
    hinted: bool
    prefetched_node: str
    prefetched_s: float
    moves: int
    pin_node: str
    avoided: int
    source_nodes: _containers.RepeatedScalarFieldContainer[str]
    worth: str
    scores: _containers.RepeatedCompositeFieldContainer[NodeScore]
    taken: bool
    until_first_s: _containers.ScalarMap[str, float]
    after_s: _containers.ScalarMap[str, float]
    def __init__(self, what: _Optional[str] = ..., ago_s: _Optional[float] = ..., node: _Optional[str] = ..., request_id: _Optional[str] = ..., hinted: _Optional[bool] = ..., prefetched_node: _Optional[str] = ..., prefetched_s: _Optional[float] = ..., moves: _Optional[int] = ..., pin_node: _Optional[str] = ..., avoided: _Optional[int] = ..., source_nodes: _Optional[_Iterable[str]] = ..., worth: _Optional[str] = ..., scores: _Optional[_Iterable[_Union[NodeScore, _Mapping]]] = ..., taken: _Optional[bool] = ..., until_first_s: _Optional[_Mapping[str, float]] = ..., after_s: _Optional[_Mapping[str, float]] = ...) -> None: ...

class NodeScore(_message.Message):
    __slots__ = ("node", "terms")
    class TermsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    NODE_FIELD_NUMBER: _ClassVar[int]
    TERMS_FIELD_NUMBER: _ClassVar[int]
    node: str
    terms: _containers.ScalarMap[str, float]
    def __init__(self, node: _Optional[str] = ..., terms: _Optional[_Mapping[str, float]] = ...) -> None: ...

class ExplainModelRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class ModelExplanation(_message.Message):
    __slots__ = ("devices",)
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    devices: _containers.RepeatedCompositeFieldContainer[ModelOnDevice]
    def __init__(self, devices: _Optional[_Iterable[_Union[ModelOnDevice, _Mapping]]] = ...) -> None: ...

class ModelOnDevice(_message.Message):
    __slots__ = ("node", "state", "moves", "layers", "layers_lent", "may_lend")
    NODE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    MOVES_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    LAYERS_LENT_FIELD_NUMBER: _ClassVar[int]
    MAY_LEND_FIELD_NUMBER: _ClassVar[int]
    node: str
    state: ModelState
    moves: _containers.RepeatedCompositeFieldContainer[WeightsMove]
    layers: int
    layers_lent: int
    may_lend: MayLend
    def __init__(self, node: _Optional[str] = ..., state: _Optional[_Union[ModelState, str]] = ..., moves: _Optional[_Iterable[_Union[WeightsMove, _Mapping]]] = ..., layers: _Optional[int] = ..., layers_lent: _Optional[int] = ..., may_lend: _Optional[_Union[MayLend, _Mapping]] = ...) -> None: ...

class TurnsTimedRequest(_message.Message):
    __slots__ = ("turns",)
    TURNS_FIELD_NUMBER: _ClassVar[int]
    turns: _containers.RepeatedCompositeFieldContainer[TurnTimed]
    def __init__(self, turns: _Optional[_Iterable[_Union[TurnTimed, _Mapping]]] = ...) -> None: ...

class TurnTimed(_message.Message):
    __slots__ = ("session", "request_id", "until_first_s", "after_s")
    class UntilFirstSEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class AfterSEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    SESSION_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    UNTIL_FIRST_S_FIELD_NUMBER: _ClassVar[int]
    AFTER_S_FIELD_NUMBER: _ClassVar[int]
    session: _common_pb2.Session
    request_id: str
    until_first_s: _containers.ScalarMap[str, float]
    after_s: _containers.ScalarMap[str, float]
    def __init__(self, session: _Optional[_Union[_common_pb2.Session, _Mapping]] = ..., request_id: _Optional[str] = ..., until_first_s: _Optional[_Mapping[str, float]] = ..., after_s: _Optional[_Mapping[str, float]] = ...) -> None: ...

class TurnsTimedReply(_message.Message):
    __slots__ = ("attached",)
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    attached: int
    def __init__(self, attached: _Optional[int] = ...) -> None: ...

class WorkflowName(_message.Message):
    __slots__ = ("tenant", "name")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    name: str
    def __init__(self, tenant: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class CallGraph(_message.Message):
    __slots__ = ("agents", "edges", "learn")
    AGENTS_FIELD_NUMBER: _ClassVar[int]
    EDGES_FIELD_NUMBER: _ClassVar[int]
    LEARN_FIELD_NUMBER: _ClassVar[int]
    agents: _containers.RepeatedScalarFieldContainer[str]
    edges: _containers.RepeatedCompositeFieldContainer[CallEdge]
    learn: bool
    def __init__(self, agents: _Optional[_Iterable[str]] = ..., edges: _Optional[_Iterable[_Union[CallEdge, _Mapping]]] = ..., learn: _Optional[bool] = ...) -> None: ...

class CallEdge(_message.Message):
    __slots__ = ("source", "target", "probability", "calls", "delay_s", "weight")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    PROBABILITY_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    DELAY_S_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    source: str
    target: str
    probability: float
    calls: float
    delay_s: float
    weight: float
    def __init__(self, source: _Optional[str] = ..., target: _Optional[str] = ..., probability: _Optional[float] = ..., calls: _Optional[float] = ..., delay_s: _Optional[float] = ..., weight: _Optional[float] = ...) -> None: ...

class DeclareWorkflowRequest(_message.Message):
    __slots__ = ("name", "graph")
    NAME_FIELD_NUMBER: _ClassVar[int]
    GRAPH_FIELD_NUMBER: _ClassVar[int]
    name: WorkflowName
    graph: CallGraph
    def __init__(self, name: _Optional[_Union[WorkflowName, _Mapping]] = ..., graph: _Optional[_Union[CallGraph, _Mapping]] = ...) -> None: ...

class Workflow(_message.Message):
    __slots__ = ("name", "declared", "observed", "observed_edges", "edges")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DECLARED_FIELD_NUMBER: _ClassVar[int]
    OBSERVED_FIELD_NUMBER: _ClassVar[int]
    OBSERVED_EDGES_FIELD_NUMBER: _ClassVar[int]
    EDGES_FIELD_NUMBER: _ClassVar[int]
    name: WorkflowName
    declared: CallGraph
    observed: _containers.RepeatedCompositeFieldContainer[ObservedAgent]
    observed_edges: _containers.RepeatedCompositeFieldContainer[CallEdge]
    edges: _containers.RepeatedCompositeFieldContainer[CallEdge]
    def __init__(self, name: _Optional[_Union[WorkflowName, _Mapping]] = ..., declared: _Optional[_Union[CallGraph, _Mapping]] = ..., observed: _Optional[_Iterable[_Union[ObservedAgent, _Mapping]]] = ..., observed_edges: _Optional[_Iterable[_Union[CallEdge, _Mapping]]] = ..., edges: _Optional[_Iterable[_Union[CallEdge, _Mapping]]] = ...) -> None: ...

class ObservedAgent(_message.Message):
    __slots__ = ("name", "requests")
    NAME_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    name: str
    requests: int
    def __init__(self, name: _Optional[str] = ..., requests: _Optional[int] = ...) -> None: ...

class ListWorkflowsRequest(_message.Message):
    __slots__ = ("tenant",)
    TENANT_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    def __init__(self, tenant: _Optional[str] = ...) -> None: ...

class ListWorkflowsReply(_message.Message):
    __slots__ = ("workflows",)
    WORKFLOWS_FIELD_NUMBER: _ClassVar[int]
    workflows: _containers.RepeatedCompositeFieldContainer[Workflow]
    def __init__(self, workflows: _Optional[_Iterable[_Union[Workflow, _Mapping]]] = ...) -> None: ...

class DeleteWorkflowReply(_message.Message):
    __slots__ = ("known",)
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    known: bool
    def __init__(self, known: _Optional[bool] = ...) -> None: ...

class FinetuneJob(_message.Message):
    __slots__ = ("id", "tenant", "model", "data", "out", "validation", "suffix", "register", "created_s", "settings", "note")
    ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    OUT_FIELD_NUMBER: _ClassVar[int]
    VALIDATION_FIELD_NUMBER: _ClassVar[int]
    SUFFIX_FIELD_NUMBER: _ClassVar[int]
    REGISTER_FIELD_NUMBER: _ClassVar[int]
    CREATED_S_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    id: str
    tenant: str
    model: str
    data: str
    out: str
    validation: str
    suffix: str
    register: bool
    created_s: float
    settings: FinetuneSettings
    note: str
    def __init__(self, id: _Optional[str] = ..., tenant: _Optional[str] = ..., model: _Optional[str] = ..., data: _Optional[str] = ..., out: _Optional[str] = ..., validation: _Optional[str] = ..., suffix: _Optional[str] = ..., register: _Optional[bool] = ..., created_s: _Optional[float] = ..., settings: _Optional[_Union[FinetuneSettings, _Mapping]] = ..., note: _Optional[str] = ...) -> None: ...

class FinetuneSettings(_message.Message):
    __slots__ = ("rank", "alpha", "dropout", "learning_rate", "weight_decay", "warmup_ratio", "epochs", "batch_size", "max_tokens", "seed", "checkpoint_every", "tpot_ms")
    RANK_FIELD_NUMBER: _ClassVar[int]
    ALPHA_FIELD_NUMBER: _ClassVar[int]
    DROPOUT_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_DECAY_FIELD_NUMBER: _ClassVar[int]
    WARMUP_RATIO_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_EVERY_FIELD_NUMBER: _ClassVar[int]
    TPOT_MS_FIELD_NUMBER: _ClassVar[int]
    rank: int
    alpha: float
    dropout: float
    learning_rate: float
    weight_decay: float
    warmup_ratio: float
    epochs: int
    batch_size: int
    max_tokens: int
    seed: int
    checkpoint_every: int
    tpot_ms: float
    def __init__(self, rank: _Optional[int] = ..., alpha: _Optional[float] = ..., dropout: _Optional[float] = ..., learning_rate: _Optional[float] = ..., weight_decay: _Optional[float] = ..., warmup_ratio: _Optional[float] = ..., epochs: _Optional[int] = ..., batch_size: _Optional[int] = ..., max_tokens: _Optional[int] = ..., seed: _Optional[int] = ..., checkpoint_every: _Optional[int] = ..., tpot_ms: _Optional[float] = ...) -> None: ...

class FinetuneProgress(_message.Message):
    __slots__ = ("id", "state", "step", "steps", "loss", "validation_loss", "tokens", "tokens_per_s", "window", "layers", "split", "shares", "tpot_s", "checkpoints", "error", "waits", "retry")
    ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    VALIDATION_LOSS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    SPLIT_FIELD_NUMBER: _ClassVar[int]
    SHARES_FIELD_NUMBER: _ClassVar[int]
    TPOT_S_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    WAITS_FIELD_NUMBER: _ClassVar[int]
    RETRY_FIELD_NUMBER: _ClassVar[int]
    id: str
    state: str
    step: int
    steps: int
    loss: float
    validation_loss: float
    tokens: int
    tokens_per_s: float
    window: int
    layers: int
    split: int
    shares: int
    tpot_s: float
    checkpoints: _containers.RepeatedScalarFieldContainer[int]
    error: str
    waits: str
    retry: bool
    def __init__(self, id: _Optional[str] = ..., state: _Optional[str] = ..., step: _Optional[int] = ..., steps: _Optional[int] = ..., loss: _Optional[float] = ..., validation_loss: _Optional[float] = ..., tokens: _Optional[int] = ..., tokens_per_s: _Optional[float] = ..., window: _Optional[int] = ..., layers: _Optional[int] = ..., split: _Optional[int] = ..., shares: _Optional[int] = ..., tpot_s: _Optional[float] = ..., checkpoints: _Optional[_Iterable[int]] = ..., error: _Optional[str] = ..., waits: _Optional[str] = ..., retry: _Optional[bool] = ...) -> None: ...

class RemoveModelRequest(_message.Message):
    __slots__ = ("tenant", "model")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    model: str
    def __init__(self, tenant: _Optional[str] = ..., model: _Optional[str] = ...) -> None: ...

class RemoveModelReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FinetuneName(_message.Message):
    __slots__ = ("tenant", "id")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    id: str
    def __init__(self, tenant: _Optional[str] = ..., id: _Optional[str] = ...) -> None: ...

class ListFinetunesRequest(_message.Message):
    __slots__ = ("tenant", "after", "limit")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    after: str
    limit: int
    def __init__(self, tenant: _Optional[str] = ..., after: _Optional[str] = ..., limit: _Optional[int] = ...) -> None: ...

class ListFinetunesReply(_message.Message):
    __slots__ = ("finetunes", "more", "unknown_after")
    FINETUNES_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_AFTER_FIELD_NUMBER: _ClassVar[int]
    finetunes: _containers.RepeatedCompositeFieldContainer[Finetune]
    more: bool
    unknown_after: bool
    def __init__(self, finetunes: _Optional[_Iterable[_Union[Finetune, _Mapping]]] = ..., more: _Optional[bool] = ..., unknown_after: _Optional[bool] = ...) -> None: ...

class Finetune(_message.Message):
    __slots__ = ("job", "progress", "node", "started_s", "ended_s", "events", "losses", "checkpoints")
    JOB_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    STARTED_S_FIELD_NUMBER: _ClassVar[int]
    ENDED_S_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    LOSSES_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    job: FinetuneJob
    progress: FinetuneProgress
    node: str
    started_s: float
    ended_s: float
    events: _containers.RepeatedCompositeFieldContainer[FinetuneEvent]
    losses: _containers.RepeatedCompositeFieldContainer[FinetuneLoss]
    checkpoints: _containers.RepeatedCompositeFieldContainer[FinetuneCheckpoint]
    def __init__(self, job: _Optional[_Union[FinetuneJob, _Mapping]] = ..., progress: _Optional[_Union[FinetuneProgress, _Mapping]] = ..., node: _Optional[str] = ..., started_s: _Optional[float] = ..., ended_s: _Optional[float] = ..., events: _Optional[_Iterable[_Union[FinetuneEvent, _Mapping]]] = ..., losses: _Optional[_Iterable[_Union[FinetuneLoss, _Mapping]]] = ..., checkpoints: _Optional[_Iterable[_Union[FinetuneCheckpoint, _Mapping]]] = ...) -> None: ...

class FinetuneEvent(_message.Message):
    __slots__ = ("number", "at_s", "level", "message")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    AT_S_FIELD_NUMBER: _ClassVar[int]
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    number: int
    at_s: float
    level: str
    message: str
    def __init__(self, number: _Optional[int] = ..., at_s: _Optional[float] = ..., level: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class FinetuneLoss(_message.Message):
    __slots__ = ("step", "loss", "validation_loss")
    STEP_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    VALIDATION_LOSS_FIELD_NUMBER: _ClassVar[int]
    step: int
    loss: float
    validation_loss: float
    def __init__(self, step: _Optional[int] = ..., loss: _Optional[float] = ..., validation_loss: _Optional[float] = ...) -> None: ...

class FinetuneCheckpoint(_message.Message):
    __slots__ = ("step", "at_s", "loss", "validation_loss")
    STEP_FIELD_NUMBER: _ClassVar[int]
    AT_S_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    VALIDATION_LOSS_FIELD_NUMBER: _ClassVar[int]
    step: int
    at_s: float
    loss: float
    validation_loss: float
    def __init__(self, step: _Optional[int] = ..., at_s: _Optional[float] = ..., loss: _Optional[float] = ..., validation_loss: _Optional[float] = ...) -> None: ...

class LeaveNodeRequest(_message.Message):
    __slots__ = ("node", "lost")
    NODE_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    node: str
    lost: bool
    def __init__(self, node: _Optional[str] = ..., lost: _Optional[bool] = ...) -> None: ...

class LeaveNodeReply(_message.Message):
    __slots__ = ("state", "requests", "waits_for", "pending_bytes")
    STATE_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    WAITS_FOR_FIELD_NUMBER: _ClassVar[int]
    PENDING_BYTES_FIELD_NUMBER: _ClassVar[int]
    state: str
    requests: int
    waits_for: str
    pending_bytes: int
    def __init__(self, state: _Optional[str] = ..., requests: _Optional[int] = ..., waits_for: _Optional[str] = ..., pending_bytes: _Optional[int] = ...) -> None: ...
