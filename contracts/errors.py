"""Every error that Upbeat raises on purpose, grouped by who can act on it.

UpbeatError
├── ConfigError            the operator: a setting is wrong; names the key, the value and the remedy; stops the start
├── RequestError           the caller: answered in OpenAI's envelope, naming the field
│   ├── InvalidRequest     400
│   ├── Unauthorized       401
│   ├── Forbidden          403
│   ├── NotFound           404
│   ├── BodyTooSlow        408
│   ├── BodyTooLarge       413
│   ├── WrongMediaType     415
│   ├── Misdirected        421: the request names a host that is not this server's
│   ├── RateLimited        429
│   └── Unavailable        503: no node can serve this now; a retry helps
├── IllegalTransition      the programmer: an event that its state does not allow
└── PieceLost              no action needed: KV is missing and is recomputed, unseen by users
"""

from __future__ import annotations


class UpbeatError(Exception):
    """Base of everything above."""


class ConfigError(UpbeatError):
    """A setting is missing or wrong. The message names the key, the value and the remedy."""


class IllegalTransition(UpbeatError):
    """An event arrived in a state whose table has no entry for it."""


class PieceLost(UpbeatError):
    """A piece is missing, short or fails its checksum. Recomputation follows."""


class RequestError(UpbeatError):
    """The caller's request cannot be served; `envelope()` is what the caller reads."""

    status = 400
    type = "invalid_request_error"
    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code if code is not None else type(self).code

    def envelope(self) -> dict[str, dict[str, str | None]]:
        """OpenAI's error body."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


class InvalidRequest(RequestError):
    """400: a field is wrong; `param` names it."""

    code = "invalid_value"


class Unauthorized(RequestError):
    """401: no key, or an unknown one."""

    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class Forbidden(RequestError):
    """403: a known caller lacks this permission."""

    status = 403
    type = "permission_error"
    code = "forbidden"


class NotFound(RequestError):
    """404: the model, session or route does not exist."""

    status = 404
    type = "not_found_error"
    code = "not_found"


class BodyTooSlow(RequestError):
    """408: the body did not arrive in time."""

    status = 408
    code = "body_too_slow"


class BodyTooLarge(RequestError):
    """413: the body is over the limit."""

    status = 413
    code = "body_too_large"


class WrongMediaType(RequestError):
    """415: this route does not read bodies of this content type."""

    status = 415
    code = "unsupported_media_type"


class Misdirected(RequestError):
    """421: the request's Host is not one of this server's names."""

    status = 421
    code = "host_not_allowed"


class RateLimited(RequestError):
    """429: over a limit; `Retry-After` says when to come back."""

    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"


class Unavailable(RequestError):
    """503: no node can serve this at the moment."""

    status = 503
    type = "server_error"
    code = "unavailable"


BY_STATUS: dict[int, type[RequestError]] = {
    c.status: c
    for c in (
        InvalidRequest,
        Unauthorized,
        Forbidden,
        NotFound,
        BodyTooSlow,
        BodyTooLarge,
        WrongMediaType,
        Misdirected,
        RateLimited,
        Unavailable,
    )
}


def from_wire(status: int, message: str, param: str | None, code: str | None) -> RequestError:
    """The inverse of `to_wire`."""
    return BY_STATUS.get(status, Unavailable)(message, param=param, code=code)


def to_wire(error: RequestError) -> list[object]:
    """`[status, message, param, code]`, as frames and RPC details carry it."""
    return [error.status, error.message, error.param, error.code]
