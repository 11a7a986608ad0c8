"""The API's own description: OpenAPI 3.1, from the same schemas that check requests."""

from __future__ import annotations

from functools import cache
from typing import Any

from contracts.advisory import MAX_ADVISORIES
from contracts.ids import SESSION_ID_PATTERN
from contracts.workflow import MAX_AGENTS, MAX_CALLS, MAX_DELAY_S, MAX_EDGES
from gateway.core.browser_tokens import DEFAULT_LIFE_S, MAX_LIFE_S, MIN_LIFE_S
from gateway.core.spellings import ROOTS
from gateway.openai.answers import ANSWERS, PARAMETERS, TEXTS
from gateway.openai.parameters import HARMLESS, REFUSED
from gateway.openai.requests import ChatRequest, CompletionRequest

Schema = dict[str, Any]
_ID = {"type": "string", "pattern": f"^{SESSION_ID_PATTERN}$"}
_ADVISORY: Schema = {
    "type": "object",
    "required": ["session_id"],
    "additionalProperties": False,
    "properties": {
        "session_id": _ID,
        "model_id": {"type": ["string", "null"], "minLength": 1, "maxLength": 256},
        "expected_arrival": {"type": ["number", "null"], "minimum": 0, "maximum": 86_400, "description": "seconds from now"},
        "ordered": {"type": "boolean", "description": "this caller's hints come true in list order"},
        "priority": {"type": "integer", "minimum": -1000, "maximum": 1000, "description": "lower is more urgent"},
        "ttl_s": {"type": ["number", "null"], "minimum": 0, "maximum": 86_400},
        "token": {"type": "string", "description": "the credential, for callers that cannot set headers"},
    },
}
_BATCH: Schema = {
    "type": "object",
    "required": ["advisories"],
    "additionalProperties": False,
    "properties": {
        "advisories": {"type": "array", "items": _ADVISORY, "minItems": 1, "maxItems": MAX_ADVISORIES},
        "token": {"type": "string"},
    },
}
_INVALIDATION: Schema = {
    "type": "object",
    "additionalProperties": False,
    "properties": {"session_id": _ID, "advisory_id": _ID, "token": {"type": "string"}},
    "oneOf": [{"required": ["session_id"]}, {"required": ["advisory_id"]}],
}
_CLIENT_SECRET: Schema = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "session_id": _ID,
        "session_prefix": _ID | {"description": "good for every session whose id begins so"},
        "expires_after": {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                "anchor": {"enum": ["created_at"]},
                "seconds": {"type": "integer", "minimum": MIN_LIFE_S, "maximum": MAX_LIFE_S, "default": DEFAULT_LIFE_S},
            },
        },
        "origin": {"type": ["string", "null"], "description": "only pages of this origin may use it: https://chat.example.org"},
    },
    "oneOf": [{"required": ["session_id"]}, {"required": ["session_prefix"]}],
}
_WORKFLOW: Schema = {
    "type": "object",
    "required": ["agents"],
    "additionalProperties": False,
    "properties": {
        "agents": {"type": "array", "items": _ID, "minItems": 1, "maxItems": MAX_AGENTS},
        "edges": {
            "type": "array",
            "maxItems": MAX_EDGES,
            "items": {
                "type": "object",
                "required": ["from", "to"],
                "additionalProperties": False,
                "properties": {
                    "from": _ID,
                    "to": _ID,
                    "probability": {"type": "number", "minimum": 0, "maximum": 1, "description": "that it is called at all; default 1"},
                    "calls": {"type": "number", "minimum": 1, "maximum": MAX_CALLS, "description": "how often then; default 1"},
                    "delay_s": {
                        "type": "number",
                        "minimum": 0,
                        "maximum": MAX_DELAY_S,
                        "description": "from the start of the one request to the start of the other; default 0",
                    },
                },
            },
        },
        "learn": {"type": "boolean", "description": "what is observed moves it; default true"},
    },
}
_ERROR: Schema = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"], "description": "the field or header that is wrong"},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}

_ERROR_REFERENCE: Schema = {"$ref": "#/components/schemas/Error"}
_READY_OR_ERROR: Schema = {"oneOf": [ANSWERS[("get", "/ready")], _ERROR_REFERENCE]}

#: (method, path, what it does, schema of its body)
ROUTES: list[tuple[str, str, str, Schema | None]] = [
    ("post", "/v1/chat/completions", "Answer a chat, streamed or not. OpenAI's format.", ChatRequest.model_json_schema()),
    ("post", "/v1/completions", "Complete a prompt, streamed or not. OpenAI's format.", CompletionRequest.model_json_schema()),
    ("get", "/v1/models", "List the models that are served.", None),
    ("get", "/v1/models/{model}", "One model.", None),
    ("post", "/v1/embeddings", "Refused: models here generate text.", None),
    ("post", "/v1/advisory", "Sessions are about to speak: bring their caches up. No text.", {"oneOf": [_ADVISORY, _BATCH]}),
    ("post", "/v1/invalidate", "A session will not speak after all.", _INVALIDATION),
    ("post", "/v1/client_secrets", "A browser token: for minutes, for a session or a prefix, for hints only.", _CLIENT_SECRET),
    ("get", "/v1/sessions", "List this tenant's sessions.", None),
    ("get", "/v1/sessions/{session_id}", "Where a session's cache is, by node and tier.", None),
    ("get", "/v1/sessions/{session_id}/placement", "Why its last turns and hints went where they went.", None),
    ("get", "/v1/sessions/{session_id}/events", "Where its cache is, told again at each change (server-sent events).", None),
    ("delete", "/v1/sessions/{session_id}", "Erase a session from every tier.", None),
    ("get", "/v1/workflows", "List this tenant's agent workflows.", None),
    ("get", "/v1/workflows/{name}", "A workflow's call graph, as declared and as learned.", None),
    ("put", "/v1/workflows/{name}", "Declare a workflow's call graph.", _WORKFLOW),
    ("delete", "/v1/workflows/{name}", "Forget a workflow and what was learned of it.", None),
    ("get", "/v1/fleet", "The nodes and their load; with `?metrics=true` also their samples.", None),
    ("get", "/health", "The process lives.", None),
    ("get", "/ready", "A node can answer requests for the configured model; with `?all=1`, every node serves.", None),
    ("get", "/version", "Which release this is.", None),
    ("get", "/metrics", "Prometheus metrics.", None),
]


@cache
def openapi() -> Schema:
    """The whole document."""
    paths: dict[str, Schema] = {}
    components: dict[str, Any] = {"Error": _ERROR}
    for method, path, summary, schema in ROUTES:
        kind = TEXTS.get((method, path))
        content: Schema = {kind: {"schema": {"type": "string"}}} if kind else {}
        if (method, path) in ANSWERS:
            content |= _json(ANSWERS[(method, path)])
        operation: Schema = {
            "summary": summary,
            "responses": {
                "202" if path in ("/v1/advisory", "/v1/invalidate") else "200": {"description": "done", "content": content},
                "4XX": {"description": "the caller's error", "content": _json(_ERROR_REFERENCE)},
                "5XX": {"description": "try again", "content": _json(_READY_OR_ERROR if path == "/ready" else _ERROR_REFERENCE)},
            },
        }
        if path == "/v1/embeddings":
            del operation["responses"]["200"]
        names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
        parameters = [("path", name, _ID if name in ("session_id", "name") else {"type": "string"}) for name in names]
        parameters += PARAMETERS.get((method, path), [])
        if parameters:
            operation["parameters"] = [
                {"name": name, "in": place, "required": place == "path", "schema": form} for place, name, form in parameters
            ]
        if schema:
            operation["requestBody"] = {"required": True, "content": _json(_placed(schema, components))}
        paths.setdefault(path, {})[method] = operation
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Upbeat",
            "version": "1",
            "description": "Accepted and without effect on any answer: "
            + ", ".join(sorted(HARMLESS))
            + ". Hints in other systems' words: "
            + ", ".join(sorted(ROOTS))
            + ". Refused by name unless idle: "
            + ", ".join(sorted(set(REFUSED) - set(ChatRequest.model_fields)))
            + "; and by completions "
            + ", ".join(sorted(set(REFUSED) & set(ChatRequest.model_fields)))
            + ".",
        },
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }


def _json(schema: Schema) -> Schema:
    return {"application/json": {"schema": schema}}


def _placed(schema: Schema, components: dict[str, Any]) -> Schema:
    """The schema with its definitions moved to `components`."""
    inner = {k: v for k, v in schema.items() if k != "$defs"}
    for name, definition in schema.get("$defs", {}).items():
        components[name] = _pointed(definition)
    moved = _pointed(inner)
    assert isinstance(moved, dict)
    return moved


def _pointed(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: v.replace("#/$defs/", "#/components/schemas/") if k == "$ref" else _pointed(v) for k, v in value.items()}
    return [_pointed(v) for v in value] if isinstance(value, list) else value
