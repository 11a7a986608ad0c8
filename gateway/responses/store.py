"""Stored responses, in one SQLite database that all processes of a gateway share: DATA/responses/responses.db.

Kept `keep_s` seconds after the last use of their session. A tenant has at most its share of the bytes, all together at
most the limit; then the tenant's own session that was used least recently leaves, its beginning first; the rest of it
goes next, because a conversation without its beginning is of no use. A session has at most `MOST_RESPONSES`. Every
function blocks, but not for long, and may raise sqlite3.Error: call them on one thread.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import re
import sqlite3
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from gateway.responses import damage
from gateway.responses.schema import bring_up
from gateway.responses.stored_items import ALIVE, StoredItems, TooLong

#: What a response takes beside its text, in bytes; also bounds their number.
ROW_BYTES = 1024
#: Responses that one conversation may have.
MOST_TURNS = 4096
#: Responses that one session may have; then its oldest leave.
MOST_RESPONSES = 10_000
#: So many responses leave at a time, and about so many bytes: their text is overwritten, which takes time.
LEAVING, LEAVING_BYTES = 64, 8 << 20
#: The use of a session is noted this seldom, in seconds.
NOTED_S = 60.0
RUNNING = ("queued", "in_progress")
#: How a body begins (`events.ResponseAnswer`): before anything that the caller or the model has said.
_HEAD = re.compile(
    rb'(\{"id":"resp_[0-9a-f]{32}","object":"response","created_at":\d+,"status":")([a-z_]+)(","background":)'
    rb'(true|false)(,"error":)(null|(?=\{))'
)
_ENDED = b'{"code":"server_error","message":"the process that computed it has ended; send the request again"}'
_BUSY_S = 5.0
#: Without its second half SQLite would read all rows, because the index has only those that run.
_RUN_BY = "runner = ? AND runner != ''"
_CHAIN = """
WITH RECURSIVE chain (id, previous, depth) AS (
    SELECT id, previous, 0 FROM responses WHERE tenant = :tenant AND id = :id
    UNION ALL
    SELECT r.id, r.previous, depth + 1 FROM responses r JOIN chain ON r.id = chain.previous
    WHERE r.tenant = :tenant AND depth < :most
)
"""


@dataclass(slots=True)
class Readable:
    """What a caller reads of a response: not its input, which may be much longer. body: the object without its output;
    body, output: JSON."""

    id: str
    tenant: str
    session: str
    status: str
    body: bytes
    output: bytes

    @property
    def background(self) -> bool:
        """Whether it was made in the background."""
        found = _HEAD.match(self.body)
        return found is not None and found[4] == b"true"

    def shown(self) -> bytes:
        """The response object, as JSON. It may be large, so nothing of it is decoded: its status may be newer than its
        body, and a process that has ended wrote no error."""
        body, found = self.body, _HEAD.match(self.body)
        if found is not None:
            error = _ENDED if self.status == "failed" and found[6] == b"null" else found[6]
            parts = found[1], self.status.encode(), found[3], found[4], found[5], error
            body = b"".join(parts) + body[found.end() :]
        return body[:-1] + b',"output":' + self.output + b"}"


@dataclass(slots=True)
class Response(Readable):
    """One response, whole. input: JSON. previous: the id of the response that it goes on from, or empty. runner: the
    process that computes it, or empty."""

    input: bytes
    previous: str = ""
    runner: str = ""

    @property
    def bytes_(self) -> int:
        """What it counts toward its tenant's share."""
        return len(self.body) + len(self.output) + len(self.input) + ROW_BYTES


@dataclass(frozen=True, slots=True)
class Earlier:
    """The conversation up to a response. items: JSON, a list. whole: no earlier response was deleted."""

    session: str
    status: str
    items: bytes
    whole: bool


class Store:
    """See the module."""

    def __init__(self, folder: Path, keep_s: float, limit_bytes: int, share: float) -> None:
        """share: of the bytes, what one tenant may have."""
        self._path = folder / "responses.db"
        self._keep_s, self._limit_bytes, self._most_bytes = keep_s, limit_bytes, int(limit_bytes * share)
        self._db: sqlite3.Connection | None = None
        self._opened_inode: int | None = None
        self.items = StoredItems(self._opened, keep_s)

    # ---- life --------------------------------------------------------------------------------------------------
    def _opened(self) -> sqlite3.Connection:
        if self._db is None:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(self._path, os.O_CREAT | os.O_RDWR, 0o600))
            self._opened_inode = self._inode()
            db = sqlite3.connect(self._path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
            try:
                for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "secure_delete=ON", "temp_store=MEMORY"):
                    db.execute(f"PRAGMA {pragma}")
                bring_up(db)
            except sqlite3.Error:
                db.close()
                raise
            self._db = db
        return self._db

    def close(self) -> None:
        """Safe to call twice."""
        if self._db is not None:
            self._db.close()
            self._db = None

    def remove(self) -> bool:
        """Delete the database, also a damaged one; whether there was one. Raises OSError."""
        self.close()
        return bool(damage.delete(self._path) + damage.drop(self._path, math.inf, "responses are not stored any more"))

    def start_again(self) -> None:
        """Put a damaged database aside and begin with an empty one, unless another process has done so."""
        with contextlib.suppress(sqlite3.Error):
            self.close()
        self._db = None
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._path.with_name("start.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if self._inode() == self._opened_inode:
                damage.put_aside(self._path)

    def _inode(self) -> int | None:
        with contextlib.suppress(FileNotFoundError):
            return self._path.stat().st_ino
        return None

    @contextlib.contextmanager
    def _change(self) -> Iterator[sqlite3.Connection]:
        """A transaction that writes."""
        db = self._opened()
        db.execute("BEGIN IMMEDIATE")
        try:
            yield db
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                db.execute("ROLLBACK")
            raise
        db.execute("COMMIT")

    # ---- writing -----------------------------------------------------------------------------------------------
    def put(self, response: Response, now_s: float) -> bool:
        """Store it, or store it anew; False: it is larger than its tenant's share. now_s: seconds since the epoch."""
        if response.bytes_ > self._most_bytes:
            return False
        with self._change() as db:
            # Before room is made, so that it is not this session that goes.
            db.execute(
                "UPDATE sessions SET used_s = ? WHERE tenant = ? AND session = ? AND used_s < ?",
                (now_s, response.tenant, response.session, now_s - NOTED_S),
            )
            self._drop_beginning(db, response.tenant, response.session)
            self._make_room(db, response)
            db.execute(
                "INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (response.id, response.tenant, response.session, response.previous, now_s, response.status,
                 response.body, response.output, response.input, response.bytes_, response.runner),
            )  # fmt: skip
        return True

    def settle(self, response: Response, now_s: float) -> bool:
        """What has become of a response that ran in the background; False: it was cancelled or deleted meanwhile."""
        with self._change() as db:
            done = db.execute(
                f"UPDATE responses SET status = ?, body = ?, output = ?, bytes = ?, used_s = ?, runner = '' "
                f"WHERE id = ? AND tenant = ? AND status IN {RUNNING}",
                (response.status, response.body, response.output, response.bytes_, now_s, response.id,
                 response.tenant),
            )  # fmt: skip
            if done.rowcount > 0:
                db.execute(
                    "UPDATE sessions SET used_s = ? WHERE tenant = ? AND session = ? AND used_s < ?",
                    (now_s, response.tenant, response.session, now_s),
                )
            return done.rowcount > 0

    def _drop_beginning(self, db: sqlite3.Connection, tenant: str, session: str) -> None:
        """Make room for one more response of a session that has as many as it may: its oldest leave, those that do not
        run first. Only indexes are read."""
        row = db.execute(
            "SELECT responses FROM sessions WHERE tenant = ? AND session = ?", (tenant, session)
        ).fetchone()
        leaving = min(row[0] + 1 - MOST_RESPONSES, LEAVING) if row is not None else 0
        for which in (" AND rowid NOT IN (SELECT rowid FROM responses WHERE runner != '')", ""):
            if leaving > 0:
                oldest = f"tenant = ? AND session = ?{which} ORDER BY rowid"
                leaving -= self._leave(db, oldest, (tenant, session), leaving)

    def _leave(self, db: sqlite3.Connection, which: str, given: tuple[object, ...], most: int = LEAVING) -> int:
        """Delete the first of these responses, as many as may leave at a time; how many."""
        leaving: list[tuple[int]] = []
        length = 0
        lengths = "length(body) + length(output) + length(input)"
        found = db.execute(f"SELECT rowid, {lengths} FROM responses WHERE {which} LIMIT ?", (*given, most))
        with contextlib.closing(found):
            for rowid, bytes_ in found:
                leaving.append((rowid,))
                length += bytes_
                if length >= LEAVING_BYTES:
                    break
        db.executemany("DELETE FROM responses WHERE rowid = ?", leaving)
        return len(leaving)

    def _make_room(self, db: sqlite3.Connection, response: Response) -> None:
        wanted = response.bytes_
        while self._total(db, response.tenant) + wanted > self._most_bytes:
            if not self._drop_oldest(db, response.tenant):
                break
        while self._total(db) + wanted > self._limit_bytes:
            greediest = db.execute("SELECT tenant FROM totals ORDER BY bytes DESC LIMIT 1").fetchone()
            if greediest is None or not self._drop_oldest(db, greediest[0]):
                break

    def _total(self, db: sqlite3.Connection, tenant: str | None = None) -> int:
        where = ("", ()) if tenant is None else (" WHERE tenant = ?", (tenant,))
        return int(db.execute(f"SELECT COALESCE(SUM(bytes), 0) FROM totals{where[0]}", where[1]).fetchone()[0])

    def _drop_oldest(self, db: sqlite3.Connection, tenant: str) -> bool:
        """Drop the beginning of the tenant's session that was used least recently: one in which nothing runs, if there
        is one. Its rest goes next."""
        oldest = "SELECT session FROM sessions WHERE tenant = ?{} ORDER BY used_s LIMIT 1"
        # The plus: else SQLite would look at all of the tenant's rows instead of those that run.
        idle = " AND session NOT IN (SELECT session FROM responses WHERE +tenant = ? AND runner != '')"
        found = (
            db.execute(oldest.format(idle), (tenant, tenant)).fetchone()
            or db.execute(oldest.format(""), (tenant,)).fetchone()
        )
        if found is None:
            return False
        return self._leave(db, "tenant = ? AND session = ? ORDER BY rowid", (tenant, found[0])) > 0

    def delete(self, tenant: str, response_id: str) -> bool:
        """Whether there was one. Its text is overwritten."""
        with self._change() as db:
            gone = db.execute("DELETE FROM responses WHERE tenant = ? AND id = ?", (tenant, response_id)).rowcount > 0
        self._forget_log()
        return gone

    def forget(self, tenant: str, session: str) -> int:
        """Delete some responses of a session; how many. Call it until it is none. Their text is overwritten. A damaged
        database may hold more of it, so one that was put aside is deleted too."""
        with self._change() as db:
            gone = self._leave(db, "tenant = ? AND session = ?", (tenant, session))
        if gone:
            self._forget_log()
        damage.drop(self._path, math.inf, "a session is erased")
        return gone

    def _forget_log(self) -> None:
        """Pages that were overwritten also leave the write-ahead log."""
        self._opened().execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def sweep(self, now_s: float) -> int:
        """Delete some of what nobody has used for so long, also of a damaged database; how many responses. Call it
        until it is none: one call does not keep others waiting for long."""
        with self._change() as db:
            expired = (
                "SELECT r.rowid FROM sessions s JOIN responses r USING (tenant, session) WHERE s.used_s < ? LIMIT ?"
            )
            gone = self._leave(db, f"rowid IN ({expired})", (now_s - self._keep_s, LEAVING))
        if gone:
            self._forget_log()
        damage.drop(self._path, now_s - self._keep_s, "it is as old as responses may become")
        return gone

    # ---- background --------------------------------------------------------------------------------------------
    def cancel(self, tenant: str, response_id: str) -> None:
        """Mark a running one as cancelled; whoever runs it stops."""
        with self._change() as db:
            db.execute(
                f"UPDATE responses SET status = 'cancelled', runner = '' WHERE tenant = ? AND id = ? "
                f"AND status IN {RUNNING}",
                (tenant, response_id),
            )

    def running(self, runner: str) -> set[str]:
        """Ids of those that this process is to run."""
        return {row[0] for row in self._opened().execute(f"SELECT id FROM responses WHERE {_RUN_BY}", (runner,))}

    def abandon(self, runner: str, ids: Iterable[str]) -> None:
        """These of a process have failed: it does not run them."""
        with self._change() as db:
            db.executemany(
                "UPDATE responses SET status = 'failed', runner = '' WHERE runner = ? AND id = ?",
                [(runner, response_id) for response_id in ids],
            )

    def beat(self, runner: str) -> None:
        """The process lives."""
        with self._change() as db:
            db.execute(
                "INSERT INTO runners VALUES (?, 1) ON CONFLICT (name) DO UPDATE SET beats = beats + 1", (runner,)
            )

    def beats(self) -> dict[str, int]:
        """By process that runs something or did: how often it has said that it lives."""
        known = dict(self._opened().execute("SELECT name, beats FROM runners").fetchall())
        running = self._opened().execute("SELECT DISTINCT runner FROM responses WHERE runner != ''").fetchall()
        return {name: known.get(name, 0) for name in {*known, *(row[0] for row in running)}}

    def bury(self, runner: str) -> None:
        """The process has ended: what it ran has failed."""
        with self._change() as db:
            db.execute(f"UPDATE responses SET status = 'failed', runner = '' WHERE {_RUN_BY}", (runner,))
            db.execute("DELETE FROM runners WHERE name = ?", (runner,))

    # ---- reading -----------------------------------------------------------------------------------------------
    def get(self, tenant: str, response_id: str, now_s: float) -> Readable | None:
        """The response, unless it has expired. Its input is not read from the disk: a row's columns before it are."""
        row = self._opened().execute(
            "SELECT id, tenant, session, status, body, output FROM responses "
            f"WHERE {ALIVE}",
            (tenant, response_id, now_s - self._keep_s),
        ).fetchone()  # fmt: skip
        return Readable(*row) if row is not None else None

    def session(self, tenant: str, response_id: str, now_s: float) -> str | None:
        """The response's session."""
        row = self._opened().execute(
            "SELECT session FROM responses WHERE tenant = ? AND id = ? AND used_s >= ?",
            (tenant, response_id, now_s - self._keep_s),
        ).fetchone()  # fmt: skip
        return str(row[0]) if row is not None else None

    def earlier(self, tenant: str, response_id: str, now_s: float, most_bytes: int) -> Earlier | None:
        """The conversation up to this response, whose use is noted; None: it is not stored, or has expired. Raises
        TooLong."""
        last = self._opened().execute(
            "SELECT session, status FROM responses WHERE tenant = ? AND id = ? AND used_s >= ?",
            (tenant, response_id, now_s - self._keep_s),
        ).fetchone()  # fmt: skip
        if last is None:
            return None
        given = {"tenant": tenant, "id": response_id, "most": MOST_TURNS}
        db, joined = self._opened(), "FROM chain JOIN responses r ON r.id = chain.id"
        total = f"{_CHAIN} SELECT COALESCE(SUM(length(r.input) + length(r.output)), 0) {joined}"
        if db.execute(total, given).fetchone()[0] > most_bytes:
            raise TooLong
        rows = db.execute(
            f"{_CHAIN} SELECT r.input, r.output, r.previous, r.session {joined} ORDER BY depth DESC", given
        ).fetchall()
        self._use(tenant, {row[3] for row in rows}, now_s)
        whole = bool(rows) and not rows[0][2]
        parts = [part[1:-1] for row in rows for part in row[:2] if len(part) > 2]
        return Earlier(last[0], last[1], items=b"[" + b",".join(parts) + b"]", whole=whole)

    def _use(self, tenant: str, sessions: Iterable[str], now_s: float) -> None:
        """Note the use of sessions, unless it has just been noted: most uses write nothing."""
        known = "tenant = ? AND session = ? AND used_s < ?"
        given = [(tenant, session, now_s - NOTED_S) for session in sessions]
        db = self._opened()
        old = [one for one in given if db.execute(f"SELECT 1 FROM sessions WHERE {known}", one).fetchone()]
        if old:
            with self._change():
                db.executemany(f"UPDATE sessions SET used_s = ? WHERE {known}", [(now_s, *one) for one in old])
