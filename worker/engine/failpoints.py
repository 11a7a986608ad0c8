"""Points at which a request kills or hangs the engine, to test the effect on other requests.

`worker.failpoints` arms them: {"step": "kill:WORD"}. The action, `kill` (SIGKILL of this process) or `hang` (the thread
sleeps forever), applies to requests whose prompt contains WORD. Not for production: a worker with armed points logs a
warning at start. Without the setting nothing happens.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterable, Mapping

from contracts.errors import ConfigError
from contracts.request import GenerateRequest
from runtime import telemetry

log = telemetry.logger("worker.engine.failpoints")
#: Failpoints, by what is about to happen to the request.
POINTS: Mapping[str, str] = {
    "tokenise": "its prompt is made into tokens, on a thread of its own",
    "step": "a step that holds it runs, on the engine's thread",
}
_ACTION = re.compile(r"(kill|hang):([A-Za-z0-9_-]{4,64})")

_armed: dict[str, tuple[str, str]] = {}


def reach(point: str, requests: Iterable[GenerateRequest]) -> None:
    """Requests have reached this point. If it is armed and one contains the word, kills the process or hangs."""
    if point not in _armed:
        return
    action, word = _armed[point]
    if any(word in f"{request.prompt} {request.messages}" for request in requests):
        log.warning("failpoint", point=point, action=action)
        if action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        while True:
            time.sleep(60.0)


def arm(wanted: Mapping[str, str]) -> None:
    """Arm exactly these points. Raises ConfigError naming key, value and remedy; then none is armed."""
    _armed.clear()
    armed = {}
    for point, action in wanted.items():
        match = _ACTION.fullmatch(action)
        if point not in POINTS or match is None:
            raise ConfigError(
                f"worker.failpoints.{point} = {action!r}: give one of {', '.join(POINTS)}, and kill:WORD or hang:WORD"
            )
        armed[point] = (match[1], match[2])
    _armed.update(armed)
    if _armed:
        log.warning("failpoints are armed: requests can make this worker fail", failpoints=dict(wanted))
