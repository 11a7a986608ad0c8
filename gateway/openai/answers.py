"""Schemas of each route's answers, for the API's description. Tests check a real gateway's answers against them."""

from __future__ import annotations

from typing import Any

from contracts.turn_times import Phase

Schema = dict[str, Any]
_TEXT: Schema = {"type": "string"}
_OPTIONAL_TEXT: Schema = {"type": ["string", "null"]}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_NUMBER: Schema = {"type": "number"}
_TRUTH: Schema = {"type": "boolean"}
_ANYTHING: Schema = {"type": ["object", "null"]}
_FREE: Schema = {"type": "object", "additionalProperties": True}


def _object(**properties: Schema) -> Schema:
    """An object with at least these fields."""
    return {"type": "object", "required": list(properties), "properties": properties}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _one(value: str) -> Schema:
    return {"const": value}


def _listing(items: Schema) -> Schema:
    return _object(object=_one("list"), data=_list(items))


_USAGE = _object(
    prompt_tokens=_COUNT,
    completion_tokens=_COUNT,
    total_tokens=_COUNT,
    prompt_tokens_details=_object(cached_tokens=_COUNT),
)
_ENDS: Schema = {"enum": ["stop", "length", "tool_calls", "function_call", "content_filter", None]}
_CALL = _object(id=_TEXT, type=_one("function"), function=_object(name=_TEXT, arguments=_TEXT))
_MESSAGE = _object(role=_one("assistant"), content=_OPTIONAL_TEXT)
_MESSAGE["properties"] |= {"tool_calls": _list(_CALL), "reasoning_content": _TEXT}
_CHAT = _object(
    id=_TEXT,
    object=_one("chat.completion"),
    created=_COUNT,
    model=_TEXT,
    choices=_list(_object(index=_COUNT, message=_MESSAGE, logprobs=_ANYTHING, finish_reason=_ENDS)),
    usage=_USAGE,
)
_COMPLETION = _object(
    id=_TEXT,
    object=_one("text_completion"),
    created=_COUNT,
    model=_TEXT,
    choices=_list(_object(index=_COUNT, text=_TEXT, logprobs=_ANYTHING, finish_reason=_ENDS)),
    usage=_USAGE,
)
_RESPONSE = _object(
    id=_TEXT,
    object=_one("response"),
    created_at=_COUNT,
    status={"enum": ["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]},
    model=_TEXT,
    output=_list(_FREE),
    usage=_ANYTHING,
    error=_ANYTHING,
    store=_TRUTH,
)
_ANTHROPIC = _object(
    id=_TEXT,
    type=_one("message"),
    role=_one("assistant"),
    content=_list(_FREE),
    stop_reason={"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use"]},
    usage=_object(input_tokens=_COUNT, cache_read_input_tokens=_COUNT, output_tokens=_COUNT),
)
_MODEL = _object(id=_TEXT, object=_one("model"), created=_COUNT, owned_by=_TEXT)
_MOVE = _object(ago_s=_NUMBER, state=_TEXT, why=_TEXT, other=_OPTIONAL_TEXT, seconds=_NUMBER)
_MODEL_PLACEMENT = _object(
    id=_TEXT, object=_one("model.placement"), nodes=_list(_object(node=_TEXT, state=_TEXT, moves=_list(_MOVE)))
)
_TOKENS = _object(count=_COUNT, max_model_len=_COUNT, tokens=_list(_COUNT))
_TOKENS["properties"]["token_strs"] = {"type": ["array", "null"], "items": _TEXT}
_ACCEPTED = _object(advisory_id=_TEXT, session_id=_TEXT, status=_one("accepted"))
_SESSION = _object(
    id=_TEXT,
    object=_one("session"),
    model=_TEXT,
    tokens=_COUNT,
    last_use_s=_NUMBER,
    node=_OPTIONAL_TEXT,
    held_by=_list(_TEXT),
)
_TIER = _object(tier=_TEXT, tokens=_COUNT, layers=_COUNT, layer_chunks=_list(_COUNT), bytes=_COUNT)
_RESIDENCY = _object(**_SESSION["properties"], nodes=_list(_object(node=_TEXT, tiers=_list(_TIER))))
_TIMES: Schema = {"type": ["object", "null"], "propertyNames": {"enum": [*Phase]}, "additionalProperties": _NUMBER}
_DECISION = _object(what=_TEXT, ago_s=_NUMBER, node=_TEXT, until_first_s=_TIMES, after_s=_TIMES)
_PLACEMENT = _object(id=_TEXT, object=_one("session.placement"), decisions=_list(_DECISION))
_ERASED = _object(
    id=_TEXT,
    object=_one("session.deleted"),
    deleted=_TRUTH,
    verified=_TRUTH,
    nodes=_list(_object(node=_TEXT, answered=_TRUTH, verified=_TRUTH, left=_FREE)),
)
_EDGE = _object(**{"from": _TEXT, "to": _TEXT, "probability": _NUMBER, "calls": _NUMBER, "delay_s": _NUMBER})
_WORKFLOW = _object(
    id=_TEXT,
    object=_one("workflow"),
    declared=_ANYTHING,
    learned=_object(agents=_list(_FREE), edges=_list(_EDGE)),
    edges=_list(_EDGE),
)
_FORGOTTEN = _object(id=_TEXT, object=_one("workflow.deleted"), deleted=_TRUTH)
_SECRET = _object(
    object=_one("client_secret"),
    value=_TEXT,
    expires_at=_COUNT,
    origin=_OPTIONAL_TEXT,
    permissions=_list({"enum": ["advise", "invalidate"]}),
)
_FLEET = _object(
    object=_one("fleet"),
    ready=_TRUTH,
    missing=_list(_TEXT),
    scheduler_live=_TRUTH,
    schedulers=_list(
        _object(address=_TEXT, state={"enum": ["serving", "gathering", "silent"]}, nodes=_COUNT, advised=_COUNT)
    ),
    expected_nodes=_COUNT,
    active_requests=_COUNT,
    nodes=_list(
        _object(
            node=_TEXT,
            on_node=_TEXT,
            device=_COUNT,
            serving=_TRUTH,
            state=_TEXT,
            running=_COUNT,
            waiting=_COUNT,
            memory=_list(_object(use=_TEXT, name=_TEXT, bytes=_COUNT)),
        )
    ),
)
_SCALE = _object(
    object=_one("scale"),
    desired_nodes=_COUNT,
    wanted_nodes=_COUNT,
    why=_TEXT,
    nodes=_COUNT,
    starting_nodes=_COUNT,
    devices=_COUNT,
    demand=_NUMBER,
    utilisation={"type": ["number", "null"]},
    arriving_work=_NUMBER,
    work_s=_NUMBER,
    kv_needed=_object(hbm=_NUMBER, dram=_NUMBER),
    slo=_object(attainment={"type": ["number", "null"]}, turns=_COUNT),
    models=_list(
        _object(
            model=_TEXT,
            work_s=_NUMBER,
            work_s_a_node=_NUMBER,
            arriving_work=_NUMBER,
            nodes=_COUNT,
            attainment=_FREE,
            turns=_FREE,
        )
    ),
    devices_work_s=_FREE,
    unmeasured_devices=_COUNT,
    incomplete=_TEXT,
    policy=_object(min_nodes=_COUNT, max_nodes=_COUNT, target_utilisation=_NUMBER),
)
_FILE = _object(
    id=_TEXT,
    object=_one("file"),
    bytes=_COUNT,
    created_at=_COUNT,
    filename=_TEXT,
    purpose=_TEXT,
    status=_TEXT,
)
_OPTIONAL_COUNT: Schema = {"type": ["integer", "null"], "minimum": 0}
_JOB = _object(
    id=_TEXT,
    object=_one("fine_tuning.job"),
    created_at=_COUNT,
    finished_at=_OPTIONAL_COUNT,
    model=_TEXT,
    fine_tuned_model=_OPTIONAL_TEXT,
    status={"enum": ["queued", "running", "succeeded", "failed", "cancelled"]},
    error=_ANYTHING,
    hyperparameters=_FREE,
    training_file=_TEXT,
    validation_file=_OPTIONAL_TEXT,
    result_files=_list(_TEXT),
    trained_tokens=_OPTIONAL_COUNT,
    seed=_COUNT,
    metadata=_ANYTHING,
)
_EVENT = _object(
    id=_TEXT,
    object=_one("fine_tuning.job.event"),
    created_at=_COUNT,
    level={"enum": ["info", "warn", "error"]},
    message=_TEXT,
)
_CHECKPOINT = _object(
    id=_TEXT, object=_one("fine_tuning.job.checkpoint"), created_at=_COUNT, step_number=_COUNT, metrics=_FREE
)
_READY = _object(
    status={"enum": ["ready", "not ready"]}, missing=_list(_TEXT), nodes_serving=_COUNT, nodes_expected=_COUNT
)

#: Schema of the successful answer, by method and path. Routes that stream or answer text are in `TEXTS` too.
ANSWERS: dict[tuple[str, str], Schema] = {
    ("post", "/v1/chat/completions"): _CHAT,
    ("post", "/v1/completions"): _COMPLETION,
    ("post", "/v1/responses"): _RESPONSE,
    ("get", "/v1/responses/{response_id}"): _RESPONSE,
    ("get", "/v1/responses/{response_id}/input_items"): _object(
        object=_one("list"), data=_list(_FREE), first_id=_OPTIONAL_TEXT, last_id=_OPTIONAL_TEXT, has_more=_TRUTH
    ),
    ("delete", "/v1/responses/{response_id}"): _object(id=_TEXT, object=_one("response"), deleted=_TRUTH),
    ("post", "/v1/responses/{response_id}/cancel"): _RESPONSE,
    ("post", "/v1/messages"): _ANTHROPIC,
    ("post", "/v1/messages/count_tokens"): _object(input_tokens=_COUNT),
    ("post", "/v1/embeddings"): _listing(_FREE),
    ("post", "/tokenize"): _TOKENS,
    ("post", "/detokenize"): _object(prompt=_TEXT),
    ("get", "/v1/models"): _listing(_MODEL),
    ("get", "/v1/models/{model}"): _MODEL,
    ("delete", "/v1/models/{model}"): _object(id=_TEXT, object=_one("model"), deleted=_TRUTH),
    ("get", "/v1/models/{model}/placement"): _MODEL_PLACEMENT,
    ("post", "/v1/advisory"): {"oneOf": [_ACCEPTED, _object(advisories=_list(_ACCEPTED))]},
    ("post", "/v1/invalidate"): _object(status=_one("accepted")),
    ("post", "/v1/client_secrets"): _SECRET,
    ("get", "/v1/sessions"): _listing(_SESSION),
    ("get", "/v1/sessions/{session_id}"): _RESIDENCY,
    ("get", "/v1/sessions/{session_id}/placement"): _PLACEMENT,
    ("delete", "/v1/sessions/{session_id}"): _ERASED,
    ("get", "/v1/workflows"): _listing(_WORKFLOW),
    ("get", "/v1/workflows/{name}"): _WORKFLOW,
    ("put", "/v1/workflows/{name}"): _WORKFLOW,
    ("delete", "/v1/workflows/{name}"): _FORGOTTEN,
    ("post", "/v1/files"): _FILE,
    ("get", "/v1/files"): _listing(_FILE),
    ("get", "/v1/files/{file_id}"): _FILE,
    ("delete", "/v1/files/{file_id}"): _object(id=_TEXT, object=_one("file"), deleted=_TRUTH),
    ("post", "/v1/fine_tuning/jobs"): _JOB,
    ("get", "/v1/fine_tuning/jobs"): _listing(_JOB),
    ("get", "/v1/fine_tuning/jobs/{job_id}"): _JOB,
    ("post", "/v1/fine_tuning/jobs/{job_id}/cancel"): _JOB,
    ("get", "/v1/fine_tuning/jobs/{job_id}/events"): _listing(_EVENT),
    ("get", "/v1/fine_tuning/jobs/{job_id}/checkpoints"): _listing(_CHECKPOINT),
    ("get", "/v1/fleet"): _FLEET,
    ("get", "/v1/scale"): _SCALE,
    ("get", "/health"): _object(status=_one("ok")),
    ("get", "/ready"): _READY,
    ("get", "/version"): _object(version=_TEXT),
}
#: Other answers: a stream of events, or text that is not JSON.
TEXTS: dict[tuple[str, str], str] = {
    ("post", "/v1/chat/completions"): "text/event-stream",
    ("post", "/v1/completions"): "text/event-stream",
    ("post", "/v1/responses"): "text/event-stream",
    ("post", "/v1/messages"): "text/event-stream",
    ("get", "/v1/sessions/{session_id}/events"): "text/event-stream",
    ("get", "/metrics"): "text/plain",
    ("get", "/v1/files/{file_id}/content"): "application/octet-stream",
}
_HEADER_ID: Schema = {"type": "string", "pattern": r"^[A-Za-z0-9_-][A-Za-z0-9._:-]{0,127}$"}
_TIMING: Schema = {"type": "string", "description": "1: the end of a stream says where its time went, in a comment"}
#: Headers of requests for text.
_OF_TEXT: list[tuple[str, str, Schema]] = [
    ("header", "X-Session-Id", _HEADER_ID),
    ("header", "X-Upbeat-Node", _TEXT),
    ("header", "X-Upbeat-Timing", _TIMING),
]
#: Parameters besides those in the path: (in, name, schema).
PARAMETERS: dict[tuple[str, str], list[tuple[str, str, Schema]]] = {
    ("post", "/v1/chat/completions"): _OF_TEXT,
    ("post", "/v1/completions"): _OF_TEXT,
    ("post", "/v1/responses"): _OF_TEXT,
    ("post", "/v1/messages"): _OF_TEXT,
    ("post", "/v1/messages/count_tokens"): [("header", "X-Upbeat-Node", _TEXT)],
    ("post", "/v1/embeddings"): [("header", "X-Upbeat-Node", _TEXT)],
    ("post", "/tokenize"): [("header", "X-Upbeat-Node", _TEXT)],
    ("post", "/detokenize"): [("header", "X-Upbeat-Node", _TEXT)],
    ("get", "/v1/responses/{response_id}"): [("query", "stream", {"enum": ["false", "0"]})],
    ("get", "/v1/responses/{response_id}/input_items"): [
        ("query", "limit", {"type": "integer", "minimum": 1, "maximum": 100}),
        ("query", "order", {"enum": ["desc", "asc"]}),
        ("query", "after", _TEXT),
    ],
    ("get", "/v1/sessions"): [("query", "limit", {"type": "integer", "minimum": 1, "maximum": 1_000})],
    ("get", "/v1/files"): [
        ("query", "limit", {"type": "integer", "minimum": 1, "maximum": 10_000}),
        ("query", "order", {"enum": ["desc", "asc"]}),
        ("query", "after", _TEXT),
        ("query", "purpose", _TEXT),
    ],
    **{
        ("get", f"/v1/fine_tuning/jobs{tail}"): [
            ("query", "limit", {"type": "integer", "minimum": 1, "maximum": 100}),
            ("query", "after", _TEXT),
        ]
        for tail in ("", "/{job_id}/events", "/{job_id}/checkpoints")
    },
    ("get", "/v1/fleet"): [("query", "metrics", {"enum": ["true", "false"]})],
    ("get", "/ready"): [
        ("query", "all", {"enum": ["1", "true", "0", "false"], "description": "1: whether every node serves"})
    ],
}
