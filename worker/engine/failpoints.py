"""Points at which this process dies, hangs or is slow, to test the effect on requests.

`worker.failpoints` arms them: {"step": "kill:WORD"}. Actions:

- kill:WORD, hang:WORD: SIGKILL of this process, or the thread sleeps forever, for a request whose prompt has WORD. Only
  at points of requests.
- once:FILE: SIGKILL of this process, if it can delete FILE: once for each time that somebody makes it.
- delay:MS: the thread sleeps.

Not for production: a worker with armed points logs a warning at start. Without the setting nothing happens.
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
#: Points of requests, by what is about to happen to one.
OF_REQUESTS: Mapping[str, str] = {
    "tokenise": "its prompt is made into tokens, on a thread of its own",
    "step": "a step that holds it runs, on the engine's thread",
}
#: Points of models whose weights come and go, by the state of one. On the engine's thread, except `model.piece`.
OF_MODELS: Mapping[str, str] = {
    "model.waiting": "it is cold and has a request",
    "model.loading": "its weights have begun to come",
    "model.piece": "a copy thread copies a piece of its weights next",
    "model.layerwise": "a step uses a layer while later ones are still to come",
    "model.active": "all of its weights have come, and nothing has been computed since",
    "model.circulating": "it lends another number of layers: some move next",
    "model.draining": "its sequences are preempted and their KV is being saved",
    "model.unloading": "it counts as cold, and its weights still hold memory",
}
_ACTION = re.compile(r"(kill|hang):([A-Za-z0-9_-]{4,64})|(once):(/[^\0]{1,4000})|(delay):([0-9]{1,5})")

_armed: dict[str, tuple[str, str]] = {}


def reach(point: str, requests: Iterable[GenerateRequest] = ()) -> None:
    """This point is reached, by these requests. If it is armed and meant, dies, hangs or waits."""
    if point not in _armed:
        return
    action, what = _armed[point]
    if action == "delay":
        time.sleep(int(what) / 1000)
    elif _is_deleted(what) if action == "once" else any(what in f"{r.prompt} {r.messages}" for r in requests):
        log.warning("failpoint", point=point, action=action)
        if action != "hang":
            os.kill(os.getpid(), signal.SIGKILL)
        while True:
            time.sleep(60.0)


def arm(wanted: Mapping[str, str]) -> None:
    """Arm exactly these points. Raises ConfigError naming key, value and remedy; then none is armed."""
    _armed.clear()
    armed = {}
    for point, action in wanted.items():
        match = _ACTION.fullmatch(action)
        if match is None or not (point in OF_REQUESTS or (point in OF_MODELS and match[1] is None)):
            raise ConfigError(
                f"worker.failpoints.{point} = {action!r}: give one of {', '.join(OF_REQUESTS)}, and kill:WORD or "
                f"hang:WORD; or one of these or {', '.join(OF_MODELS)}, and once:FILE (an absolute path) or delay:MS"
            )
        action, what = (each for each in match.groups() if each is not None)
        armed[point] = (action, what)
    _armed.update(armed)
    if _armed:
        log.warning("failpoints are armed: this worker can fail", failpoints=dict(wanted))


def _is_deleted(file: str) -> bool:
    try:
        os.unlink(file)
    except OSError:
        return False
    return True
