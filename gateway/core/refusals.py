"""Interprets a scheduler's refusal: an error for the caller, no node at the moment, or no scheduler."""

from __future__ import annotations

import json

from contracts.errors import RequestError, Unavailable, from_wire


def refusal(details: str) -> RequestError | None:
    """The error in an RPC's details (JSON of `contracts.errors.to_wire`); None: the transport failed."""
    try:
        status, message, param, code = json.loads(details)
    except (ValueError, TypeError):
        return None
    if not isinstance(status, int) or not isinstance(message, str):
        return None
    return from_wire(status, message, param, code)


def is_final(error: RequestError, *, model_known: bool, pin_known: bool) -> bool:
    """Whether a retry cannot succeed.

    A scheduler that has just started knows no nodes and so neither models nor pinned nodes. If the gateway knows them,
    a 4xx about them is temporary.
    """
    if isinstance(error, Unavailable) or error.status >= 500:
        return False
    if error.param == "model":
        return not model_known
    return not (error.param == "X-Upbeat-Node" and pin_known)
