"""Which routes of a vLLM server the sidecar passes requests to, and which fields of ours each of them reads.

The list of paths is complete: the server's other routes (LoRA adapters, profiling, sleeping, stored responses) are its
operator's. The fields are read from the server's own description, /openapi.json, as they differ by route and version.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

#: Paths, all POST. True: the model computes the prompt, so its KV is cached.
PATHS: Mapping[str, bool] = {
    "/v1/chat/completions": True,
    "/v1/completions": True,
    "/v1/responses": True,
    "/v1/messages": True,
    "/v1/embeddings": True,
    "/v1/messages/count_tokens": False,
    "/tokenize": False,
    "/detokenize": False,
}
#: How deep a description is followed, and how many forms of a body are looked at; vLLM's own are three deep, and two.
_DEEPEST, _MOST_FORMS = 16, 64


@dataclass(frozen=True, slots=True)
class Route:
    """A route of the server. computes: see `PATHS`. The others: whether its body has the field; a body that may have
    several forms has it if every form does."""

    computes: bool
    kv_transfer_params: bool = False
    cache_salt: bool = False
    priority: bool = False
    request_id: bool = False


_FIELDS = ("kv_transfer_params", "cache_salt", "priority", "request_id")


def routes_of(description: Any) -> dict[str, Route]:
    """The routes of `PATHS` that the server has. description: its /openapi.json; what makes no sense in it counts as
    absent."""
    found = {}
    paths = _mapping(_mapping(description).get("paths"))
    for path, computes in PATHS.items():
        post = _mapping(_mapping(paths.get(path)).get("post"))
        if not post:
            continue
        content = _mapping(_mapping(post.get("requestBody")).get("content"))
        schema = _mapping(content.get("application/json")).get("schema")
        forms = list(islice(_forms(description, schema, _DEEPEST), _MOST_FORMS + 1))
        readable = 0 < len(forms) <= _MOST_FORMS
        fields = {name: readable and all(name in form for form in forms) for name in _FIELDS}
        found[path] = Route(computes, **fields)
    return found


def _forms(description: Any, schema: Any, depth: int) -> Iterator[set[str]]:
    """The properties of each form that a schema allows."""
    schema = _mapping(schema)
    if depth <= 0:
        yield set()
        return
    reference = schema.get("$ref")
    if isinstance(reference, str):
        name = reference.removeprefix("#/components/schemas/")
        schemas = _mapping(_mapping(_mapping(description).get("components")).get("schemas"))
        yield from _forms(description, schemas.get(name), depth - 1)
        return
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            for form in schema[key]:
                yield from _forms(description, form, depth - 1)
            return
    found = set(_mapping(schema.get("properties")))
    parts = schema.get("allOf")
    for part in parts if isinstance(parts, list) else ():
        found.update(*islice(_forms(description, part, depth - 1), _MOST_FORMS))
    yield found


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
