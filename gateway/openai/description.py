"""The API's description in OpenAPI 3.1, from the schemas that check requests. `GET /docs` shows it."""

from __future__ import annotations

from functools import cache
from typing import Any

from contracts.errors import BY_STATUS
from gateway.openai.answers import ANSWERS, PARAMETERS, TEXTS
from gateway.openai.bodies import ID, Schema
from gateway.openai.routes import TAGS, Route, routes
from runtime import version as release

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
                "code": {"type": ["string", "null"], "description": "stable, for programs"},
            },
        }
    },
}
#: Meaning of each status, and an example's message, param and code.
_ERRORS: dict[int, tuple[str, str, str | None, str]] = {
    400: ("A field is wrong; `param` names it.", "temperature: input should be less than or equal to 2; got 3",
    "temperature",
          "invalid_value"),
    401: ("No key, or an unknown one.", "no API key was given: send `Authorization: Bearer KEY`", None,
    "invalid_api_key"),
    403: ("A known key without this right, or a page of another site.", "this route needs a server key", None,
    "forbidden"),
    404: ("The model, session, file or workflow does not exist.", "the model 'a' does not exist or you do not have "
        "access to it", "model",
          "model_not_found"),
    408: ("The body arrived too slowly.", "the body did not arrive in time; send it at once", None, "body_too_slow"),
    413: ("The body is too large.", "the body is larger than 16777216 bytes", None, "body_too_large"),
    415: ("The Content-Type is not JSON.", "send the body as JSON, with the header `Content-Type: "
        "application/json`", "Content-Type",
          "unsupported_media_type"),
    429: ("Over a limit; `Retry-After` says for how long.", "more than 60 requests a minute; try again in 1.5s", None,
          "rate_limit_exceeded"),
    503: ("No node can take it now; `Retry-After` says when to try again.", "this gateway is stopping; try again", None,
    "unavailable"),
}  # fmt: skip
_ERROR_REFERENCE: Schema = {"$ref": "#/components/schemas/Error"}
_READY_OR_ERROR: Schema = {"oneOf": [ANSWERS[("get", "/ready")], _ERROR_REFERENCE]}
_ABOUT = (
    "An LLM serving system with OpenAI's API, which moves a conversation's cache to where its next turn runs. "
    "More: `docs/api.md`."
)
_HINTS = ("/v1/advisory", "/v1/invalidate")


@cache
def openapi(model: str = "upbeat-demo") -> Schema:
    """The whole document. model: the model in its examples."""
    paths: dict[str, Schema] = {}
    components: dict[str, Any] = {"Error": _ERROR}
    for route in routes(model):
        paths.setdefault(route.path, {})[route.method] = _operation(route, components)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Upbeat", "version": release.version(), "description": _ABOUT},
        "tags": [{"name": name, "description": text} for name, text in TAGS.items()],
        "paths": paths,
        "components": {
            "schemas": components,
            "responses": {str(status): _error_answer(status) for status in _ERRORS},
            "securitySchemes": {
                "key": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "An API key. Without keys in the configuration, none is needed.",
                }
            },
        },
        "security": [{"key": []}, {}],
    }


def _operation(route: Route, components: dict[str, Any]) -> Schema:
    key = (route.method, route.path)
    kind = TEXTS.get(key)
    content: Schema = {kind: {"schema": {"type": "string"}}} if kind else {}
    if key in ANSWERS:
        content = _json(ANSWERS[key]) | content
    responses: Schema = {}
    responses["202" if route.path in _HINTS else "200"] = {"description": "Success.", "content": content}
    errors = sorted({*route.errors} if route.open else {401, 429, *route.errors})
    responses |= {str(status): {"$ref": f"#/components/responses/{status}"} for status in errors}
    responses["4XX"] = {"description": "Any other error in the request.", "content": _json(_ERROR_REFERENCE)}
    if route.path == "/ready":
        responses["503"] = {"description": "Not ready; `missing` says why.", "content": _json(_READY_OR_ERROR)}
    responses["5XX"] = {
        "description": "Any other error of the server; try again.",
        "content": _json(_ERROR_REFERENCE),
    }
    operation: Schema = {
        "tags": [route.tag],
        "summary": route.summary,
        "operationId": route.method
        + "".join(part.strip("{}").title() for part in route.path.removeprefix("/v1").replace("_", "/").split("/")),
        "responses": responses,
    }
    if route.more:
        operation["description"] = route.more
    if route.open:
        operation["security"] = []
    names = [part[1:-1] for part in route.path.split("/") if part.startswith("{")]
    parameters = [("path", name, ID if name in ("session_id", "name") else {"type": "string"}) for name in names]
    parameters += PARAMETERS.get(key, [])
    if parameters:
        operation["parameters"] = [
            {"name": name, "in": place, "required": place == "path", "schema": form} for place, name, form in parameters
        ]
    if route.body and route.form:
        described = {"multipart/form-data": {"schema": route.body}}
        operation["requestBody"] = {"required": True, "content": described}
    elif route.body:
        described = _json(_placed(route.body, components))
        described["application/json"]["examples"] = {name: {"value": value} for name, value in route.examples}
        operation["requestBody"] = {"required": True, "content": described}
    return operation


def _error_answer(status: int) -> Schema:
    description, message, param, code = _ERRORS[status]
    error = BY_STATUS[status](message, param=param, code=code)
    content = _json(_ERROR_REFERENCE)
    content["application/json"]["example"] = error.envelope()
    return {"description": description, "content": content}


def _json(schema: Schema) -> Schema:
    return {"application/json": {"schema": schema}}


def _placed(schema: Schema, components: dict[str, Any]) -> Schema:
    """The schema, its definitions moved to `components`, which is mutated."""
    inner = {k: v for k, v in schema.items() if k != "$defs"}
    for name, definition in schema.get("$defs", {}).items():
        components[name] = _pointed(definition)
    moved = _pointed(inner)
    assert isinstance(moved, dict)
    return moved


def _pointed(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            k: v.replace("#/$defs/", "#/components/schemas/") if k == "$ref" else _pointed(v) for k, v in value.items()
        }
    return [_pointed(v) for v in value] if isinstance(value, list) else value
