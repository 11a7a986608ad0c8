"""Schemas of bodies other than requests for text (hints, browser tokens, workflows), for the API's description."""

from __future__ import annotations

from typing import Any

from contracts.advisory import MAX_ADVISORIES
from contracts.ids import SESSION_ID_PATTERN
from contracts.workflow import MAX_AGENTS, MAX_CALLS, MAX_DELAY_S, MAX_EDGES
from gateway.core.browser_tokens import DEFAULT_LIFE_S, MAX_LIFE_S, MIN_LIFE_S

Schema = dict[str, Any]
ID = {"type": "string", "pattern": f"^{SESSION_ID_PATTERN}$"}
ADVISORY: Schema = {
    "type": "object",
    "required": ["session_id"],
    "additionalProperties": False,
    "properties": {
        "session_id": ID,
        "model_id": {"type": ["string", "null"], "minLength": 1, "maxLength": 256},
        "expected_arrival": {
            "type": ["number", "null"],
            "minimum": 0,
            "maximum": 86_400,
            "description": "seconds from now",
        },
        "ordered": {"type": "boolean", "description": "this caller's hints come true in list order"},
        "priority": {"type": "integer", "minimum": -1000, "maximum": 1000, "description": "lower is more urgent"},
        "ttl_s": {"type": ["number", "null"], "minimum": 0, "maximum": 86_400},
        "token": {"type": "string", "description": "the credential, for callers that cannot set headers"},
    },
}
BATCH: Schema = {
    "type": "object",
    "required": ["advisories"],
    "additionalProperties": False,
    "properties": {
        "advisories": {"type": "array", "items": ADVISORY, "minItems": 1, "maxItems": MAX_ADVISORIES},
        "token": {"type": "string"},
    },
}
INVALIDATION: Schema = {
    "type": "object",
    "additionalProperties": False,
    "properties": {"session_id": ID, "advisory_id": ID, "token": {"type": "string"}},
    "oneOf": [{"required": ["session_id"]}, {"required": ["advisory_id"]}],
}
CLIENT_SECRET: Schema = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "session_id": ID,
        "session_prefix": ID | {"description": "valid for every session whose id has this prefix"},
        "expires_after": {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                "anchor": {"enum": ["created_at"]},
                "seconds": {"type": "integer", "minimum": MIN_LIFE_S, "maximum": MAX_LIFE_S, "default": DEFAULT_LIFE_S},
            },
        },
        "origin": {
            "type": ["string", "null"],
            "description": "only pages of this origin may use it: https://chat.example.org",
        },
    },
    "oneOf": [{"required": ["session_id"]}, {"required": ["session_prefix"]}],
}
WORKFLOW: Schema = {
    "type": "object",
    "required": ["agents"],
    "additionalProperties": False,
    "properties": {
        "agents": {"type": "array", "items": ID, "minItems": 1, "maxItems": MAX_AGENTS},
        "edges": {
            "type": "array",
            "maxItems": MAX_EDGES,
            "items": {
                "type": "object",
                "required": ["from", "to"],
                "additionalProperties": False,
                "properties": {
                    "from": ID,
                    "to": ID,
                    "probability": {
                        "type": "number",
                        "minimum": 0,
                        "maximum": 1,
                        "description": "that the call happens at all; default 1",
                    },
                    "calls": {
                        "type": "number",
                        "minimum": 1,
                        "maximum": MAX_CALLS,
                        "description": "number of calls if it happens; default 1",
                    },
                    "delay_s": {
                        "type": "number",
                        "minimum": 0,
                        "maximum": MAX_DELAY_S,
                        "description": "from the start of the one request to the start of the other; default 0",
                    },
                },
            },
        },
        "learn": {"type": "boolean", "description": "adjust the graph to observed calls; default true"},
    },
}
