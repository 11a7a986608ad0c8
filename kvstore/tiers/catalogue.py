"""The node's catalogue of sessions: a copy of every manifest in the blob tier, in SQLite beside the SSD's directory.

It is a cache. A listing of the blob tier says which manifests exist and in which version; the catalogue has the bytes
of those that have not changed, so that a listing of millions reads only what is new. A row counts only while the
listing shows its version, and only if its bytes decode. A missing, damaged, old or foreign file is made anew, which
costs the time of reading all manifests once.

It also remembers how long a version has been unchanged, in seconds that this node has lived: no wall clock counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from contracts.errors import PieceLost
from contracts.ids import SessionKey
from contracts.kv import Manifest
from kvstore.metrics import count, log
from kvstore.tiers.objects import Listed
from runtime.clock import Clock

#: Of the tables. A file of another version is made anew.
_VERSION = 1
#: Erased sessions that are remembered for listings that have begun before.
_DROPPED = 100_000
#: Sessions of one slice: what is forgotten or looked for between two other pieces of work.
SLICE = 1000
_TABLES = """
    CREATE TABLE manifest (id INTEGER PRIMARY KEY, path TEXT NOT NULL UNIQUE, version TEXT NOT NULL,
        tenant TEXT NOT NULL, session TEXT NOT NULL, last_use REAL NOT NULL, since REAL NOT NULL, data BLOB NOT NULL);
    CREATE INDEX by_use ON manifest (last_use);
    CREATE TABLE note (name TEXT PRIMARY KEY, value) WITHOUT ROWID;
"""
_LIVED, _SOURCE = "lived_s", "source"

T = TypeVar("T")


class Row(NamedTuple):
    """A manifest that was read from the blob tier."""

    listed: Listed
    manifest: Manifest
    data: bytes


class Idle(NamedTuple):
    """A session that has been idle for long, and its place in the order of last use."""

    last_use_s: float
    id: int
    session: SessionKey


class Seen:
    """Which rows a listing has shown: a bit for each. drops: the number of rows dropped before it began."""

    def __init__(self, drops: int = 0) -> None:
        self._bits, self.drops = bytearray(), drops

    def add(self, row: int) -> None:
        """The listing has the row."""
        if row >> 3 >= len(self._bits):
            self._bits.extend(bytes((row >> 3) + 1024 - len(self._bits)))
        self._bits[row >> 3] |= 1 << (row & 7)

    def __contains__(self, row: int) -> bool:
        return row >> 3 < len(self._bits) and bool(self._bits[row >> 3] >> (row & 7) & 1)


class Catalogue:
    """See the module. Used from one event loop; a thread of its own does the work. A method whose work fails answers
    as an empty catalogue does."""

    def __init__(
        self,
        path: Path,
        source: str,
        decode: Callable[[str, bytes], Manifest],
        clock: Clock,
        may_use: Callable[[], bool] = lambda: True,
    ) -> None:
        """source: the blob tier's URL; rows of another are void. decode: a path and bytes to a manifest; raises
        PieceLost. may_use: whether this process holds the lock on the file's directory."""
        self._path, self._source, self._decode, self._clock, self._may_use = path, source, decode, clock, may_use
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="catalogue")
        self._db: sqlite3.Connection | None = None
        #: Paths of sessions that were erased, with their number: a listing that began before knows them still.
        self._dropped: OrderedDict[str, int] = OrderedDict()
        self._drops = 0
        self._unclean = False  #: whether the write-ahead log may have what was dropped
        self._lived_before_s = 0.0  #: by earlier processes
        self._opened_s = 0.0

    # ---- listings

    def begin(self) -> Seen:
        """A listing begins."""
        return Seen(self._drops)

    async def known(self, page: Sequence[Listed], seen: Seen) -> dict[str, Manifest]:
        """By path, the manifests of this part of a listing that have not changed. Mutates `seen`."""
        return await self._run(lambda db: self._known(db, page, seen), {})

    def _known(self, db: sqlite3.Connection, page: Sequence[Listed], seen: Seen) -> dict[str, Manifest]:
        versions = {item.path: item.version for item in page if item.version}
        marks = ",".join("?" * len(versions))
        found: dict[str, Manifest] = {}
        for ident, path, version, data in db.execute(
            f"SELECT id, path, version, data FROM manifest WHERE path IN ({marks})", list(versions)
        ):
            if version == versions[path]:
                with contextlib.suppress(PieceLost):
                    found[path] = self._decode(path, data)
                    seen.add(ident)
        return found

    async def note(self, rows: Sequence[Row], seen: Seen) -> None:
        """Keep manifests that were read for a listing; those without a version are not kept. Mutates `seen`."""
        kept = [row for row in rows if row.listed.version and self._dropped.get(row.listed.path, 0) <= seen.drops]
        if kept:
            await self._run(lambda db: self._note(db, kept, seen), None)

    def _note(self, db: sqlite3.Connection, rows: Sequence[Row], seen: Seen) -> None:
        lived_s = self._lived_s()
        with db:
            for (path, _, version), manifest, data in rows:
                values = (path, version, *manifest.session, manifest.last_use_s, lived_s, data)
                changed = db.execute(
                    "INSERT INTO manifest (path, version, tenant, session, last_use, since, data)"
                    " VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (path) DO UPDATE SET version = excluded.version,"
                    " tenant = excluded.tenant, session = excluded.session, last_use = excluded.last_use,"
                    " since = CASE WHEN version = excluded.version THEN since ELSE excluded.since END,"
                    " data = excluded.data RETURNING id",
                    values,
                )
                seen.add(changed.fetchone()[0])
            _write(db, _LIVED, lived_s)

    async def complete(self, seen: Seen) -> None:
        """A listing has shown every manifest: forget the others, a slice at a time."""
        after = 0
        while after >= 0:
            after = await self._run(partial(self._forget_unseen, seen, after), -1)

    def _forget_unseen(self, seen: Seen, after: int, db: sqlite3.Connection) -> int:
        """Looks at a slice of rows. Returns the last one's id; -1 at the end."""
        rows = db.execute("SELECT id FROM manifest WHERE id > ? ORDER BY id LIMIT ?", (after, 10 * SLICE))
        ids = [ident for (ident,) in rows]
        with db:
            db.executemany("DELETE FROM manifest WHERE id = ?", [(ident,) for ident in ids if ident not in seen])
            _write(db, _LIVED, self._lived_s())
        return ids[-1] if ids else -1

    # ---- idle sessions

    async def idle(self, last_use_before_s: float, unchanged_s: float, after: Idle | None = None) -> list[Idle]:
        """The first sessions by last use, or the next after `after`, at most SLICE, that were last used before that
        wall-clock time and whose manifest has been the same for `unchanged_s` seconds of this node's life."""
        return await self._run(lambda db: self._idle(db, last_use_before_s, unchanged_s, after), [])

    def _idle(self, db: sqlite3.Connection, before_s: float, unchanged_s: float, after: Idle | None) -> list[Idle]:
        place = (after.last_use_s, after.id) if after is not None else (float("-inf"), 0)
        rows = db.execute(
            "SELECT last_use, id, tenant, session FROM manifest WHERE (last_use, id) > (?, ?) AND last_use < ?"
            " AND since <= ? ORDER BY last_use, id LIMIT ?",
            (*place, before_s, self._lived_s() - unchanged_s, SLICE),
        )
        return [Idle(last_use_s, ident, SessionKey(tenant, session)) for last_use_s, ident, tenant, session in rows]

    async def drop(self, path: str) -> None:
        """The session of this path was erased: overwrite what is known of it."""
        self._drops += 1
        self._dropped[path] = self._drops
        self._dropped.move_to_end(path)
        if len(self._dropped) > _DROPPED:
            self._dropped.popitem(last=False)

        def work(db: sqlite3.Connection) -> None:
            with db:
                gone = db.execute("DELETE FROM manifest WHERE path = ?", (path,)).rowcount
            self._unclean = self._unclean or gone > 0

        await self._run(work, None)

    async def holds(self, path: str) -> bool:
        """Whether the file may still have something of the erased session."""

        def work(db: sqlite3.Connection) -> bool:
            if self._unclean:  # the log has what was overwritten, until it is empty
                busy = db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
                self._unclean = bool(busy)
            there = db.execute("SELECT 1 FROM manifest WHERE path = ?", (path,)).fetchone() is not None
            return there or self._unclean

        return await self._run(work, False)

    async def forget(self, rows: Sequence[Idle]) -> None:
        """These sessions' manifests are being deleted."""

        def work(db: sqlite3.Connection) -> None:
            with db:
                db.executemany("DELETE FROM manifest WHERE id = ?", [(row.id,) for row in rows])

        await self._run(work, None)

    # ---- notes

    async def number(self, name: str) -> int:
        """A number that was noted; 0: none was."""
        return await self._run(lambda db: int(_read(db, name) or 0), 0)

    async def note_number(self, name: str, value: int) -> None:
        """Keep a number across restarts."""

        def work(db: sqlite3.Connection) -> None:
            with db:
                _write(db, name, value)

        await self._run(work, None)

    async def sessions(self) -> int:
        """Number of manifests."""
        return await self._run(lambda db: int(db.execute("SELECT COUNT(*) FROM manifest").fetchone()[0]), 0)

    # ---- the file

    def _lived_s(self) -> float:
        return self._lived_before_s + self._clock.now() - self._opened_s

    async def _run(self, work: Callable[[sqlite3.Connection], T], otherwise: T) -> T:
        if not self._may_use():
            return otherwise
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._try, work, otherwise)

    def _try(self, work: Callable[[sqlite3.Connection], T], otherwise: T) -> T:
        try:
            if self._db is None:
                self._db = self._open()
            return work(self._db)
        except (sqlite3.Error, OSError, ValueError, TypeError) as e:
            count("catalogue_failures")
            log.warning("the catalogue of sessions is made anew", path=str(self._path), error=str(e))
            self._remove()
            return otherwise

    def _open(self) -> sqlite3.Connection:
        """Open the file, or make it. Raises sqlite3.Error, OSError."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._opened_s = self._clock.now()
        if self._path.exists():
            try:
                db = self._connected()
                source, lived = _read(db, _SOURCE), _read(db, _LIVED)
                if db.execute("PRAGMA user_version").fetchone()[0] == _VERSION and source == self._source:
                    self._lived_before_s = float(lived or 0.0)
                    return db
                db.close()
            except (sqlite3.Error, ValueError, TypeError) as e:
                log.warning("the catalogue of sessions cannot be read", path=str(self._path), error=str(e))
            count("catalogue_rebuilt")
            self._remove()
        db = self._connected()
        with db:
            db.executescript(_TABLES)
            _write(db, _SOURCE, self._source)
            db.execute(f"PRAGMA user_version = {_VERSION}")
        self._lived_before_s = 0.0
        return db

    def _connected(self) -> sqlite3.Connection:
        db = sqlite3.connect(self._path, timeout=5.0, check_same_thread=False)
        # A power cut loses the last commits at most, and then their manifests are read again.
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")
        db.execute("PRAGMA secure_delete = ON")
        return db

    def _remove(self) -> None:
        if self._db is not None:
            with contextlib.suppress(sqlite3.Error):
                self._db.close()
            self._db = None
        for end in ("", "-wal", "-shm"):
            with contextlib.suppress(OSError):
                self._path.with_name(self._path.name + end).unlink(missing_ok=True)

    def close(self) -> None:
        """Close the file and stop the thread."""

        def work() -> None:
            if self._db is not None:
                with contextlib.suppress(sqlite3.Error):
                    self._db.close()
                self._db = None

        self._thread.submit(work)
        self._thread.shutdown(wait=True)


def _read(db: sqlite3.Connection, name: str) -> Any:
    found = db.execute("SELECT value FROM note WHERE name = ?", (name,)).fetchone()
    return found[0] if found else None


def _write(db: sqlite3.Connection, name: str, value: object) -> None:
    db.execute("INSERT OR REPLACE INTO note VALUES (?, ?)", (name, value))
