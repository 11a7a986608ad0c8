"""When a gateway stops waiting for a worker: for one request that gets no word, or for all of a worker whose engine stands still."""

from __future__ import annotations

from dataclasses import dataclass

#: A worker that has sent something this recently does not stand still, whatever the scheduler has seen, in seconds.
HEARD_S = 1.0


@dataclass(frozen=True, slots=True)
class Waits:
    """How long a request may wait, in seconds; 0: for ever."""

    accept_s: float
    first_token_s: float


def late(waits: Waits, now: float, begun_s: float, accepted_s: float | None, spoken: bool, *, alone: bool) -> str:
    """What has not come in time from the request's worker, for a human; empty: nothing. begun_s: when it was sent. spoken: it has a token.
    alone: it waits for its trial, behind others."""
    if spoken:
        return ""
    if accepted_s is None and not alone:
        return f"not accepted within {waits.accept_s:g} s" if waits.accept_s and now - begun_s > waits.accept_s else ""
    since_s = begun_s if accepted_s is None else accepted_s
    return f"no token within {waits.first_token_s:g} s" if waits.first_token_s and now - since_s > waits.first_token_s else ""


def abandoned(now: float, stalled_since_s: float | None, heard_s: float, patience_s: float, *, others: bool) -> bool:
    """Whether to give up a worker that the scheduler calls stalled: at once when others can take its requests, else after `patience_s`, as
    an only node that comes back is worth waiting for. A worker that still sends is not given up."""
    if stalled_since_s is None or now - heard_s < HEARD_S:
        return False
    return others or now - stalled_since_s > patience_s
