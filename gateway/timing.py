"""A turn's record (`core.turn_times`) as callers and metrics have it: the header `Server-Timing`, a comment in a stream, histograms.

The comment comes only where it is asked for (`X-Upbeat-Timing: 1`): readers of streams that somebody wrote by hand may trip over one.
"""

from __future__ import annotations

from aiohttp import web

from contracts.turn_times import Phase
from gateway import metrics
from gateway.core.turn_times import TurnTimes

HEADER = "Server-Timing"
#: Request header: say it at the end of a stream, too.
ASKED_BY = "X-Upbeat-Timing"
#: When a request came, by the gateway's clock; of every request.
ARRIVED_S = web.RequestKey("arrived", float)


def asks(request: web.Request) -> bool:
    """The caller wants the comment."""
    return request.headers.get(ASKED_BY) == "1"


def comment(timing: str) -> bytes:
    """What a reader of events passes over, unless it looks for it."""
    return b": server-timing " + timing.encode() + b"\n\n"


def observe(model: str, times: TurnTimes) -> None:
    """Count a turn of `model`, which is a known one: each phase until its first token, and its decoding when that has ended."""
    if not times.spoken:
        return
    for phase, seconds in times.until_first_s.items():
        metrics.child(metrics.TURN, model, phase).observe(seconds)
    if Phase.DECODE in times.after_s:
        metrics.child(metrics.TURN, model, Phase.DECODE).observe(times.after_s[Phase.DECODE])
