"""Points at which a request can be made to kill or hang the engine, for tests of what becomes of the others.

`worker.failpoints` arms them: {"step": "kill:WORD"}. An action is `kill` (SIGKILL of this process) or `hang` (the thread stands still for
ever), of each request whose prompt holds WORD. Not for production; a worker with armed points says so at start, and without the setting no
request can do anything here.
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
#: What is about to happen to the request.
POINTS: Mapping[str, str] = {
    "tokenise": "its prompt is made into tokens, on a thread of its own",
    "step": "a step that holds it runs, on the engine's thread",
}
_ACTION = re.compile(r"(kill|hang):([A-Za-z0-9_-]{4,64})")

_armed: dict[str, tuple[str, str]] = {}


def reach(point: str, requests: Iterable[GenerateRequest]) -> None:
    """These requests have come to this point. Nothing happens unless it is armed and one of them holds the word; may not return."""
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
    """Arm these points and no others. Raises ConfigError naming key, value and remedy; then none is armed."""
    _armed.clear()
    armed = {}
    for point, action in wanted.items():
        match = _ACTION.fullmatch(action)
        if point not in POINTS or match is None:
            raise ConfigError(f"worker.failpoints.{point} = {action!r}: give one of {', '.join(POINTS)}, and kill:WORD or hang:WORD")
        armed[point] = (match[1], match[2])
    _armed.update(armed)
    if _armed:
        log.warning("failpoints are armed: requests can make this worker fail", failpoints=dict(wanted))
