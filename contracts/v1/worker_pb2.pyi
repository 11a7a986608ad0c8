from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Frame(_message.Message):
    __slots__ = ("payload",)
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    payload: bytes
    def __init__(self, payload: _Optional[bytes] = ...) -> None: ...

class TokenizeRequest(_message.Message):
    __slots__ = ("tenant", "prompt", "messages", "tools", "template_kwargs", "add_special_tokens", "add_generation_prompt", "continue_final_message", "return_token_strs", "model")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_KWARGS_FIELD_NUMBER: _ClassVar[int]
    ADD_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ADD_GENERATION_PROMPT_FIELD_NUMBER: _ClassVar[int]
    CONTINUE_FINAL_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETURN_TOKEN_STRS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    prompt: bytes
    messages: bytes
    tools: str
    template_kwargs: str
    add_special_tokens: bool
    add_generation_prompt: bool
    continue_final_message: bool
    return_token_strs: bool
    model: str
    def __init__(self, tenant: _Optional[str] = ..., prompt: _Optional[bytes] = ..., messages: _Optional[bytes] = ..., tools: _Optional[str] = ..., template_kwargs: _Optional[str] = ..., add_special_tokens: _Optional[bool] = ..., add_generation_prompt: _Optional[bool] = ..., continue_final_message: _Optional[bool] = ..., return_token_strs: _Optional[bool] = ..., model: _Optional[str] = ...) -> None: ...

class TokenizeReply(_message.Message):
    __slots__ = ("tokens", "token_strs", "max_model_len", "refused")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_STRS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    token_strs: _containers.RepeatedScalarFieldContainer[str]
    max_model_len: int
    refused: str
    def __init__(self, tokens: _Optional[_Iterable[int]] = ..., token_strs: _Optional[_Iterable[str]] = ..., max_model_len: _Optional[int] = ..., refused: _Optional[str] = ...) -> None: ...

class DetokenizeRequest(_message.Message):
    __slots__ = ("tenant", "tokens", "model")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    tokens: bytes
    model: str
    def __init__(self, tenant: _Optional[str] = ..., tokens: _Optional[bytes] = ..., model: _Optional[str] = ...) -> None: ...

class DetokenizeReply(_message.Message):
    __slots__ = ("text", "refused")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    text: str
    refused: str
    def __init__(self, text: _Optional[str] = ..., refused: _Optional[str] = ...) -> None: ...

class HttpUps(_message.Message):
    __slots__ = ("ups",)
    UPS_FIELD_NUMBER: _ClassVar[int]
    ups: _containers.RepeatedCompositeFieldContainer[HttpUp]
    def __init__(self, ups: _Optional[_Iterable[_Union[HttpUp, _Mapping]]] = ...) -> None: ...

class HttpUp(_message.Message):
    __slots__ = ("flight", "head", "body", "taken", "cancel")
    FLIGHT_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    flight: int
    head: HttpRequest
    body: HttpBody
    taken: int
    cancel: bool
    def __init__(self, flight: _Optional[int] = ..., head: _Optional[_Union[HttpRequest, _Mapping]] = ..., body: _Optional[_Union[HttpBody, _Mapping]] = ..., taken: _Optional[int] = ..., cancel: _Optional[bool] = ...) -> None: ...

class HttpBody(_message.Message):
    __slots__ = ("piece", "last")
    PIECE_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    piece: bytes
    last: bool
    def __init__(self, piece: _Optional[bytes] = ..., last: _Optional[bool] = ...) -> None: ...

class HttpRequest(_message.Message):
    __slots__ = ("request_id", "model", "path", "headers", "tenant", "session_id", "priority", "source_nodes", "cache_salt", "prompt_tokens", "expected_tokens", "kept_tokens", "trace")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    HEADERS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    SOURCE_NODES_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KEPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    path: str
    headers: _containers.RepeatedCompositeFieldContainer[HttpHeader]
    tenant: str
    session_id: str
    priority: int
    source_nodes: _containers.RepeatedScalarFieldContainer[str]
    cache_salt: str
    prompt_tokens: int
    expected_tokens: int
    kept_tokens: int
    trace: str
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., path: _Optional[str] = ..., headers: _Optional[_Iterable[_Union[HttpHeader, _Mapping]]] = ..., tenant: _Optional[str] = ..., session_id: _Optional[str] = ..., priority: _Optional[int] = ..., source_nodes: _Optional[_Iterable[str]] = ..., cache_salt: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., expected_tokens: _Optional[int] = ..., kept_tokens: _Optional[int] = ..., trace: _Optional[str] = ...) -> None: ...

class HttpHeader(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: str
    def __init__(self, name: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...

class HttpDowns(_message.Message):
    __slots__ = ("downs",)
    DOWNS_FIELD_NUMBER: _ClassVar[int]
    downs: _containers.RepeatedCompositeFieldContainer[HttpDown]
    def __init__(self, downs: _Optional[_Iterable[_Union[HttpDown, _Mapping]]] = ...) -> None: ...

class HttpDown(_message.Message):
    __slots__ = ("flight", "head", "body", "end", "failed")
    FLIGHT_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    flight: int
    head: HttpAnswer
    body: bytes
    end: bool
    failed: HttpFailure
    def __init__(self, flight: _Optional[int] = ..., head: _Optional[_Union[HttpAnswer, _Mapping]] = ..., body: _Optional[bytes] = ..., end: _Optional[bool] = ..., failed: _Optional[_Union[HttpFailure, _Mapping]] = ...) -> None: ...

class HttpAnswer(_message.Message):
    __slots__ = ("status", "headers")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    HEADERS_FIELD_NUMBER: _ClassVar[int]
    status: int
    headers: _containers.RepeatedCompositeFieldContainer[HttpHeader]
    def __init__(self, status: _Optional[int] = ..., headers: _Optional[_Iterable[_Union[HttpHeader, _Mapping]]] = ...) -> None: ...

class HttpFailure(_message.Message):
    __slots__ = ("refused", "ran", "only")
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    RAN_FIELD_NUMBER: _ClassVar[int]
    ONLY_FIELD_NUMBER: _ClassVar[int]
    refused: str
    ran: bool
    only: bool
    def __init__(self, refused: _Optional[str] = ..., ran: _Optional[bool] = ..., only: _Optional[bool] = ...) -> None: ...
