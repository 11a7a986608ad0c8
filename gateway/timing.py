"""Publishes a turn's times (`core.turn_times`): the header `Server-Timing`, a comment in a stream, and histograms.

The comment is sent only on request (`X-Upbeat-Timing: 1`), because hand-written parsers may not expect one.
"""

from __future__ import annotations

from aiohttp import web

from contracts.turn_times import Phase
from gateway import metrics
from gateway.core.turn_times import TurnTimes

HEADER = "Server-Timing"
#: Request header: report the times at the end of a stream, too.
ASKED_BY = "X-Upbeat-Timing"
#: Every request's arrival, on the gateway's clock.
ARRIVED_S = web.RequestKey("arrived", float)


def asks(request: web.Request) -> bool:
    """Whether the caller asked for the comment."""
    return request.headers.get(ASKED_BY) == "1"


def observe(model: str, times: TurnTimes) -> None:
    """Count a turn of `model`, a known model: each phase until its first token, and decoding if it has ended."""
    if not times.spoken:
        return
    for phase, seconds in times.until_first_s.items():
        metrics.child(metrics.TURN, model, phase).observe(seconds)
    if Phase.DECODE in times.after_s:
        metrics.child(metrics.TURN, model, Phase.DECODE).observe(times.after_s[Phase.DECODE])
