"""What a refusal of the scheduler means: an error for the caller, or "no node at the moment", or "no scheduler"."""

from __future__ import annotations

import json

from contracts.errors import RequestError, Unavailable, from_wire


def refusal(details: str) -> RequestError | None:
    """The error that the scheduler put into an RPC's details (JSON of `contracts.errors.to_wire`); None: it said nothing,
    so the failure is the transport's."""
    try:
        status, message, param, code = json.loads(details)
    except (ValueError, TypeError):
        return None
    if not isinstance(status, int) or not isinstance(message, str):
        return None
    return from_wire(status, message, param, code)


def is_final(error: RequestError, *, model_known: bool, pin_known: bool) -> bool:
    """Whether waiting cannot help.

    A scheduler that has just started knows no node yet, and therefore neither the model nor a pinned node: when the
    gateway knows them, a 4xx about them is only a matter of time.
    """
    if isinstance(error, Unavailable) or error.status >= 500:
        return False
    if error.param == "model":
        return not model_known
    return not (error.param == "X-Upbeat-Node" and pin_known)
