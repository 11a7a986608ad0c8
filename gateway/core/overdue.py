"""Decides when a gateway stops waiting for a worker: for one request that is not answered, or for all requests of a
hung worker."""

from __future__ import annotations

from dataclasses import dataclass

#: A worker that has sent anything within this time, in seconds, is not hung, whatever the scheduler says.
HEARD_S = 1.0


@dataclass(frozen=True, slots=True)
class Waits:
    """How long a request may wait, in seconds; 0: for ever."""

    accept_s: float
    first_token_s: float


def late(waits: Waits, now: float, begun_s: float, accepted_s: float | None, spoken: bool, *, alone: bool) -> str:
    """What the request's worker has not sent in time, for a human; empty: nothing. begun_s: when the request was sent.
    spoken: it has a token. alone: it waits for its trial, behind others."""
    if spoken:
        return ""
    if accepted_s is None and not alone:
        return f"not accepted within {waits.accept_s:g} s" if waits.accept_s and now - begun_s > waits.accept_s else ""
    since_s = begun_s if accepted_s is None else accepted_s
    return (
        f"no token within {waits.first_token_s:g} s"
        if waits.first_token_s and now - since_s > waits.first_token_s
        else ""
    )


def abandoned(now: float, stalled_since_s: float | None, heard_s: float, wait_s: float, *, others: bool) -> bool:
    """Whether to give up a worker that the scheduler calls stalled: at once when others can take its requests, else
    after `wait_s`, because an only node may come back. A worker that still sends is not given up."""
    if stalled_since_s is None or now - heard_s < HEARD_S:
        return False
    return others or now - stalled_since_s > wait_s
