"""Tables of the stored responses, and how a database of an earlier version gets them.

`user_version` counts versions. A version only adds: processes of the one before, which run beside it while a gateway is
restarted, go on with the same file.

- 0: responses, runners, totals.
- 1: sessions, so that the use of a conversation is noted in one row and its responses are counted.
"""

from __future__ import annotations

import sqlite3

VERSION = 1
_TABLES = """
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, session TEXT NOT NULL, previous TEXT NOT NULL, used_s REAL NOT NULL,
    status TEXT NOT NULL, body BLOB NOT NULL, output BLOB NOT NULL, input BLOB NOT NULL, bytes INTEGER NOT NULL,
    runner TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS by_session ON responses (tenant, session);
CREATE INDEX IF NOT EXISTS by_runner ON responses (runner) WHERE runner != '';
CREATE TABLE IF NOT EXISTS runners (name TEXT PRIMARY KEY, beats INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS totals (tenant TEXT PRIMARY KEY, bytes INTEGER NOT NULL);
CREATE TRIGGER IF NOT EXISTS added AFTER INSERT ON responses BEGIN
    INSERT INTO totals VALUES (NEW.tenant, NEW.bytes) ON CONFLICT (tenant) DO UPDATE SET bytes = bytes + NEW.bytes;
END;
CREATE TRIGGER IF NOT EXISTS removed AFTER DELETE ON responses BEGIN
    UPDATE totals SET bytes = bytes - OLD.bytes WHERE tenant = OLD.tenant;
    DELETE FROM totals WHERE tenant = OLD.tenant AND bytes <= 0;
END;
CREATE TRIGGER IF NOT EXISTS changed AFTER UPDATE OF bytes ON responses BEGIN
    UPDATE totals SET bytes = bytes + NEW.bytes - OLD.bytes WHERE tenant = NEW.tenant;
END;
"""
#: used_s of a session is the last use of any of its responses; that of a response is from when it was stored.
_SESSIONS = """
CREATE TABLE IF NOT EXISTS sessions (
    tenant TEXT NOT NULL, session TEXT NOT NULL, used_s REAL NOT NULL, responses INTEGER NOT NULL,
    PRIMARY KEY (tenant, session)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS sessions_by_use ON sessions (tenant, used_s);
CREATE INDEX IF NOT EXISTS sessions_by_age ON sessions (used_s);
INSERT OR IGNORE INTO sessions SELECT tenant, session, MAX(used_s), COUNT(*) FROM responses GROUP BY tenant, session;
CREATE TRIGGER IF NOT EXISTS session_added AFTER INSERT ON responses BEGIN
    INSERT INTO sessions VALUES (NEW.tenant, NEW.session, NEW.used_s, 1) ON CONFLICT (tenant, session)
        DO UPDATE SET responses = responses + 1, used_s = MAX(used_s, NEW.used_s);
END;
CREATE TRIGGER IF NOT EXISTS session_removed AFTER DELETE ON responses BEGIN
    UPDATE sessions SET responses = responses - 1 WHERE tenant = OLD.tenant AND session = OLD.session;
    DELETE FROM sessions WHERE tenant = OLD.tenant AND session = OLD.session AND responses <= 0;
END;
DROP INDEX IF EXISTS by_use;
DROP INDEX IF EXISTS by_age;
"""


def bring_up(db: sqlite3.Connection) -> None:
    """Give a database, new or of an earlier version, the tables of this one, or change nothing. Raises sqlite3.Error,
    after which the connection is of no use."""
    if db.execute("PRAGMA user_version").fetchone()[0] < VERSION:
        # Two processes may do it one after the other: the second finds everything there.
        db.executescript(f"BEGIN IMMEDIATE;{_TABLES}{_SESSIONS}PRAGMA user_version = {VERSION};COMMIT;")
