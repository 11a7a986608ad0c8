"""The node's journal of erasures that a tier has not confirmed: one file, appended to, durable before an erasure is
answered.

One line per entry: 16 hex digits (xxh3-64 of the rest), a space, JSON. `open`: an erasure, replacing the session's
earlier one. `done`: the session's erasure has ended. `floor`: the highest number of an erasure known. Torn or damaged
lines are skipped, counted and reported. The file is rewritten beside itself and renamed when most of it is obsolete.
Only one thread writes.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import xxhash

from contracts.ids import SessionKey
from contracts.kv import KEY_BYTES
from kvstore.core.tombstone import OpenErasure, Tombstone
from kvstore.failpoints import reach
from kvstore.tiers.durability import sync_folder

#: Most open erasures, most of one tenant, and most bytes of chunk keys. Further erasures are refused; further keys are
#: left out, and their chunks are deleted as orphans.
MOST_OPEN, MOST_OF_A_TENANT, MOST_BYTES = 10_000, 5_000, 64 << 20
#: The file is rewritten when it has this many times the current bytes, and at least this many.
_HISTORY_TIMES, _HISTORY_BYTES = 2, 1 << 20
#: A larger file cannot be a valid journal and is not read.
_LONGEST = 4 * (MOST_BYTES * _HISTORY_TIMES + _HISTORY_BYTES)


class JournalFull(Exception):
    """Too many erasures are open, or too many of this tenant."""


class Journal:
    """See the module. Blocking: the shell calls it from one thread. `open`, `floor`: the current content."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.open: dict[SessionKey, OpenErasure] = {}
        self.floor = 0
        self.damaged = 0  #: lines that could not be read at the start
        self._of: Counter[str] = Counter()  #: number of open erasures by tenant
        self._lines: dict[SessionKey, int] = {}  #: bytes of each open erasure's line
        self._written = 0
        self._fd = -1

    def load(self) -> None:
        """Read the file, if there is one, and repair it. Raises OSError."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        try:
            fd = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW)
        except FileNotFoundError:
            return
        with os.fdopen(fd, "rb") as file:
            data = file.read(_LONGEST)
        for line in data.split(b"\n"):
            if line:
                self._take(line)
        self._of = Counter(session.tenant for session in self.open)
        with contextlib.suppress(OSError):  # the content read is valid; the next entry tries again
            self._rewrite()

    def _take(self, line: bytes) -> None:
        try:
            entry = _opened(line)
            session = SessionKey(str(entry["tenant"]), str(entry["session"])) if "session" in entry else None
            self.floor = max(self.floor, int(entry["number"]))
            if session is not None and entry["what"] == "done":
                self.open.pop(session, None)
            elif session is not None:
                self.open[session] = OpenErasure(
                    Tombstone(session, int(entry["number"]), dict(_chunks(entry))), bool(entry["blind"])
                )
        except (ValueError, KeyError, TypeError):
            self.damaged += 1

    # ---- writing

    def note(self, erasure: OpenErasure) -> None:
        """Append an open erasure. Raises JournalFull or OSError; nothing is noted then."""
        session = erasure.tombstone.session
        if session not in self.open and (len(self.open) >= MOST_OPEN or self._of[session.tenant] >= MOST_OF_A_TENANT):
            raise JournalFull
        line = _line(erasure)
        if sum(self._lines.values()) - self._lines.get(session, 0) + len(line) > MOST_BYTES:
            erasure = OpenErasure(Tombstone(session, erasure.tombstone.number), blind=True)
            line = _line(erasure)
        self._append(line)
        self._of[session.tenant] += session not in self.open
        self.open[session], self._lines[session] = erasure, len(line)
        self.floor = max(self.floor, erasure.tombstone.number)

    def done(self, session: SessionKey) -> None:
        """The session's erasure has ended. Raises OSError; it is then still open and ends again after a restart."""
        erasure = self.open.get(session)
        if erasure is None:
            return
        self._append(_sealed({"what": "done", **_named(session), "number": erasure.tombstone.number}))
        del self.open[session], self._lines[session]
        self._of[session.tenant] -= 1
        if self._written > _HISTORY_BYTES + _HISTORY_TIMES * sum(self._lines.values()):
            self._rewrite()

    def note_floor(self, number: int) -> None:
        """An erasure of this number is known. Raises OSError."""
        if number > self.floor:
            self._append(_sealed({"what": "floor", "number": number}))
            self.floor = number

    def _append(self, line: bytes) -> None:
        if self._fd < 0:
            self._rewrite()
        reach("journal.before_append")
        try:
            _write_all(self._fd, line)
            reach("journal.before_sync")
            os.fdatasync(self._fd)
        except OSError:
            self.close()  # the line may be torn: the next entry repairs the file
            raise
        self._written += len(line)

    def _rewrite(self) -> None:
        """Replace the file by one with the current content only."""
        self.close()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        lines = {session: _line(erasure) for session, erasure in self.open.items()}
        whole = _sealed({"what": "floor", "number": self.floor}) + b"".join(lines.values())
        beside = self._path.with_name(self._path.name + ".part")
        fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        try:
            _write_all(fd, whole)
            os.fdatasync(fd)
            reach("journal.before_rename")
            os.rename(beside, self._path)
            sync_folder(self._path.parent)
        except OSError:
            os.close(fd)
            raise
        self._fd, self._written = fd, len(whole)
        self._lines = {session: len(line) for session, line in lines.items()}

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


def _sealed(entry: dict[str, Any]) -> bytes:
    body = json.dumps(entry, separators=(",", ":")).encode()
    return xxhash.xxh3_64_hexdigest(body).encode() + b" " + body + b"\n"


def _opened(line: bytes) -> dict[str, Any]:
    """Decode a line. Raises ValueError when it is damaged."""
    digest, _, body = line.partition(b" ")
    if xxhash.xxh3_64_hexdigest(body).encode() != digest:
        raise ValueError("the line is not what was written")
    entry = json.loads(body)
    if not isinstance(entry, dict):
        raise ValueError("no entry")
    return entry


def _named(session: SessionKey) -> dict[str, str]:
    return {"tenant": session.tenant, "session": session.session_id}


def _line(erasure: OpenErasure) -> bytes:
    tombstone = erasure.tombstone
    models: dict[bytes, list[bytes]] = {}
    for key, fingerprint in tombstone.chunks.items():
        models.setdefault(fingerprint, []).append(key)
    chunks = [[_text(f), _text(b"".join(keys))] for f, keys in models.items()]
    entry = {
        "what": "open",
        **_named(tombstone.session),
        "number": tombstone.number,
        "blind": erasure.blind,
        "chunks": chunks,
    }
    return _sealed(entry)


def _chunks(entry: dict[str, Any]) -> Iterator[tuple[bytes, bytes]]:
    for fingerprint, keys in entry["chunks"]:
        joined = base64.b64decode(keys, validate=True)
        for start in range(0, len(joined), KEY_BYTES):
            yield joined[start : start + KEY_BYTES], base64.b64decode(fingerprint, validate=True)


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()
