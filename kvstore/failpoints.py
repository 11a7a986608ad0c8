"""Named points where a fault can be injected: where durability or ownership changes hands and work is half done.

`kv.failpoints` arms them: {"ssd.before_rename": "kill@3"}. An action is `kill` (SIGKILL of this process), `delay:MS`,
or `error:EIO | ENOSPC | EROFS` (an OSError, only where the code around the point handles one). `@N` applies it at the
N-th time the point is reached, instead of the first (`kill`) or every time (`delay`, `error`). A delay blocks its
thread; on the event loop it blocks the whole store. Not for production; a store with armed points says so at start.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from contracts.errors import ConfigError
from kvstore.metrics import log


class Point(NamedTuple):
    """half_done: the state while the process is at the point. errors: whether an OSError can be injected."""

    half_done: str
    errors: bool = False


#: All points.
POINTS: Mapping[str, Point] = {
    "recover.between_files": Point(
        "some files are listed, foreign ones before them are deleted, and the core knows of none"
    ),
    "save.granted": Point("slots of the arena are reserved for a worker that has not been told so"),
    "save.summed": Point("the worker has written a chunk into the arena; no slower tier has been asked to take it"),
    "ssd.part_made": Point("a temporary file has its length, and neither header nor pieces", errors=True),
    "ssd.before_sync": Point("a group's files are written under temporary names and not synced", errors=True),
    "ssd.before_rename": Point("a group's files are synced and all have temporary names", errors=True),
    "ssd.renamed": Point("at least one file of a group has its final name, others may not", errors=True),
    "ssd.before_folder_sync": Point("a group's files have their final names, which are not durable yet", errors=True),
    "ssd.before_report": Point("a group is durable and the core does not know it"),
    "ssd.before_delete": Point("the core has forgotten a chunk whose file is still there", errors=True),
    "ssd.after_delete": Point(
        "the file of an erased chunk is gone; those of the session's next chunks are not", errors=True
    ),
    "ssd.after_read": Point("pieces are in the arena and not verified", errors=True),
    "blob.before_put": Point(
        "the SSD has a chunk, the blob tier has not, and only this process knows that it is owed", errors=True
    ),
    "blob.after_put": Point("the blob tier has a chunk and the core does not know it", errors=True),
    "blob.before_delete": Point("the core has forgotten a chunk or manifest that the blob tier still has", errors=True),
    "blob.after_delete": Point("one object of an erased session is gone, others are not", errors=True),
    "blob.after_read": Point("a range of an object is in memory and not in the arena"),
    "manifest.before_put": Point(
        "a turn has ended, and the blob tier has the session's older manifest or none", errors=True
    ),
    "manifest.after_put": Point("a manifest names chunks that may be in no durable tier yet", errors=True),
    "key.before_put": Point(
        "chunks on the SSD are encrypted with a session's key that only this process knows", errors=True
    ),
    "key.after_put": Point("the blob tier has a session's key and no chunk of it", errors=True),
    "key.before_delete": Point("a session is forgotten here, and the blob tier still has its key", errors=True),
    "key.after_delete": Point("a session's key is gone, and everything else of it is there", errors=True),
    "tombstone.before_put": Point("the journal has an erasure of which the blob tier knows nothing", errors=True),
    "tombstone.after_put": Point("the blob tier has a session's tombstone and its manifest and chunks", errors=True),
    "erase.before": Point("the other sessions are known anew, and nothing of the session to erase is forgotten"),
    "erase.queued": Point("the core has forgotten a session of which every tier still has everything"),
    "journal.before_append": Point(
        "the core has forgotten a session to erase, and the journal does not say so", errors=True
    ),
    "journal.before_sync": Point("the journal has an entry that is not durable", errors=True),
    "journal.before_rename": Point("a journal without history stands beside the old one", errors=True),
    "erase.noted": Point("the journal has an erasure that has not been answered"),
    "erase.confirmed": Point("every tier has confirmed an erasure, and the journal says that it is open"),
    "peer.leased": Point("a peer's pieces are pinned and it has been told of none"),
    "peer.sending": Point("a peer reads from this arena"),
    "peer.read": Point("a peer's pieces are in this arena and not verified; the peer still has them pinned"),
}

ERRORS = ("EIO", "ENOSPC", "EROFS")
_ACTION = re.compile(rf"(kill|delay:(?P<ms>\d{{1,6}})|error:(?P<errno>{'|'.join(ERRORS)}))(@(?P<at>[1-9]\d{{0,8}}))?")
_REMEDY = "give kill, delay:MS or error:" + "|".join(ERRORS) + ", with @N for the N-th time only"


@dataclass(slots=True)
class _Armed:
    """One point's action. at: the number of the time it applies to; 0: every time. Thread-safe."""

    at: int
    delay_s: float | None
    error: int | None
    times: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def reached(self, name: str) -> None:
        with self.lock:
            self.times += 1
            if self.at and self.times != self.at:
                return
        if self.delay_s is not None:
            time.sleep(self.delay_s)
        elif self.error is not None:
            raise OSError(self.error, f"{os.strerror(self.error)} (failpoint {name})")
        else:
            os.kill(os.getpid(), signal.SIGKILL)


_armed: dict[str, _Armed] = {}


def reach(name: str) -> None:
    """This point is reached. Nothing happens unless it is armed. May raise OSError, or not return."""
    armed = _armed.get(name)
    if armed is not None:
        armed.reached(name)


def arm(wanted: Mapping[str, str]) -> None:
    """Arm these points and no others. Raises ConfigError naming key, value and remedy; then none is armed."""
    _armed.clear()
    _armed.update({name: _parse(name, action) for name, action in wanted.items()})
    if _armed:
        log.warning("failpoints are armed: this store is made to fail", failpoints=dict(wanted))


def _parse(name: str, action: str) -> _Armed:
    point = POINTS.get(name)
    if point is None:
        raise ConfigError(
            f"kv.failpoints.{name} = {action!r}: there is no such failpoint; give one of {', '.join(POINTS)}"
        )
    match = _ACTION.fullmatch(action)
    if match is None:
        raise ConfigError(f"kv.failpoints.{name} = {action!r}: {_REMEDY}")
    ms, error, at = match["ms"], match["errno"], int(match["at"] or 0)
    if error and not point.errors:
        raise ConfigError(f"kv.failpoints.{name} = {action!r}: nothing answers an error there; give kill or delay:MS")
    once = at or (0 if ms or error else 1)
    return _Armed(once, int(ms) / 1000 if ms else None, int(getattr(errno, error)) if error else None)
