"""What a store reads and writes at a time: a tenant with long inputs or long sessions costs others little."""

from __future__ import annotations

import contextlib
import os
import random
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from stored_responses import DAY_S, MOST, keeper, response, watched

from gateway.responses import store as store_module
from gateway.responses import stored_items
from gateway.responses.ids import item_id
from gateway.responses.named_sessions import NamedSessions
from gateway.responses.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "responses", DAY_S, 1 << 20, 0.5)


def seen_by(store: Store, work: Callable[[], object]) -> tuple[set[str], list[str]]:
    """The columns of `responses` that this reads, and its statements."""
    columns, statements, db = set[str](), list[str](), store._opened()

    def allow(action: int, table: str | None, column: str | None, *_: object) -> int:
        if action == sqlite3.SQLITE_READ and table == "responses" and column:
            columns.add(column)
        return sqlite3.SQLITE_OK

    db.set_authorizer(allow)
    db.set_trace_callback(statements.append)
    try:
        work()
    finally:
        db.set_authorizer(None)
        db.set_trace_callback(None)
    return columns, statements


def test_a_response_is_read_without_its_input(store: Store) -> None:
    made = response()
    store.put(made, 0.0)
    columns, _ = seen_by(store, lambda: store.get("t", made.id, 0.0))
    assert "output" in columns and "input" not in columns


@pytest.mark.parametrize("latest_first", [True, False])
def test_a_page_parses_the_input_once(store: Store, latest_first: bool) -> None:
    made = response()
    store.put(made, 0.0)
    after = item_id(made.id, "message", 0, of_input=True)
    _, statements = seen_by(store, lambda: store.items.page("t", made.id, 0.0, after, 2, latest_first=latest_first))
    assert sum("json_each" in one for one in statements) == 1


def test_an_item_is_sought_only_where_its_name_says(store: Store) -> None:
    made = response(size=10)
    store.put(made, 0.0)
    _, statements = seen_by(store, lambda: list(store.items.named("t", [item_id(made.id, "message", 0)], 0.0, MOST)))
    parsed = [one for one in statements if "json_each" in one]
    assert len(parsed) == 1 and "CAST(output" in parsed[0]


# ---- a long session costs its tenant, nobody else --------------------------------------------------------------------
def test_the_use_of_a_long_session_is_noted_in_one_row(store: Store) -> None:
    made = [response() for _ in range(50)]
    for one in made:
        store.put(one, 0.0)
    db = store._opened()
    before = db.total_changes
    store.put(response(), 1000.0)
    assert db.total_changes - before < 8, "the row, its session and its tenant's total"
    before = db.total_changes
    store.earlier("t", made[0].id, 2000.0, MOST)
    store.earlier("t", made[0].id, 2001.0, MOST)
    assert db.total_changes - before == 1, "and not again within the minute"
    assert store.get("t", made[7].id, 2000.0 + DAY_S) is not None, "a session is used as a whole"
    assert store.get("t", made[7].id, 2001.0 + DAY_S) is None


def test_a_session_has_so_many_responses_and_its_oldest_leave(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "MOST_RESPONSES", 5)
    other, running = response("other"), response(status="queued", runner="p0")
    store.put(other, 0.0)
    store.put(running, 0.0)
    made = [response() for _ in range(8)]
    for one in made:
        store.put(one, 1.0)
    left = [one for one in made if store.get("t", one.id, 1.0) is not None]
    assert left == made[-4:], "the newest"
    assert all(store.get("t", one.id, 1.0) is not None for one in (other, running)), "what runs goes last"


def test_a_long_session_expires_by_and_by(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "LEAVING", 4)
    for _ in range(10):
        store.put(response(), 0.0)
    assert [store.sweep(2 * DAY_S) for _ in range(4)] == [4, 4, 2, 0]


def test_a_long_session_is_erased_and_makes_room_by_and_by(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "LEAVING_BYTES", 100_000)
    for _ in range(8):
        store.put(response("long", size=60_000), 0.0)
    store.put(response("new", size=60_000), 100.0)
    gone = []
    while count := store.forget("t", "long"):
        gone.append(count)
    assert gone == [2, 2, 2], "and two have left before, for the new one"


def test_named_items_are_read_from_a_few_responses_at_a_time(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_items, "LOOKED", 2)
    made = [response() for _ in range(5)]
    for one in made:
        store.put(one, 0.0)
    ids = [item_id(one.id, "message", 0) for one in made]
    parts = list(store.items.named("t", ids, 0.0, MOST))
    assert [len(part) for part in parts] == [2, 2, 1] and {name for part in parts for name in part} == set(ids)


def test_what_a_process_runs_is_found_without_reading_all_rows(store: Store) -> None:
    store.put(response(), 0.0)
    _, statements = seen_by(store, lambda: (store.running("p0"), store.bury("p0"), store.beats()))
    looked = [one for one in statements if " responses " in one]
    assert len(looked) == 3
    for one in looked:
        plan = store._opened().execute(f"EXPLAIN QUERY PLAN {one}").fetchall()
        assert all("by_runner" in step[3] for step in plan), (one, plan)


VERSION_0 = """
CREATE TABLE responses (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, session TEXT NOT NULL, previous TEXT NOT NULL, used_s REAL NOT NULL,
    status TEXT NOT NULL, body BLOB NOT NULL, output BLOB NOT NULL, input BLOB NOT NULL, bytes INTEGER NOT NULL,
    runner TEXT NOT NULL
);
CREATE INDEX by_session ON responses (tenant, session);
CREATE INDEX by_use ON responses (tenant, used_s);
CREATE INDEX by_age ON responses (used_s);
"""
INSERT = "INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"


def test_a_store_of_the_version_before_keeps_its_responses(tmp_path: Path) -> None:
    with contextlib.closing(sqlite3.connect(tmp_path / "responses.db")) as old:
        old.executescript(VERSION_0)
        made = [response("s"), response("s"), response("gone")]
        for one, used_s in zip(made, (100.0, 200.0, 50.0), strict=True):
            row = (one.id, "t", one.session, "", used_s, "completed", one.body, one.output, one.input, one.bytes_, "")
            old.execute(INSERT, row)
        old.commit()
    for _ in range(2):  # the second time there is nothing to do
        store = Store(tmp_path, DAY_S, 1 << 20, 1.0)
        assert store.get("t", made[0].id, 150.0 + DAY_S) is not None, "as long as the last of its session"
        assert store.get("t", made[2].id, 150.0 + DAY_S) is None
        store.close()
    counts = sqlite3.connect(tmp_path / "responses.db")
    assert counts.execute("SELECT session, used_s, responses FROM sessions ORDER BY 1").fetchall() == [
        ("gone", 50.0, 1),
        ("s", 200.0, 2),
    ]
    # A process of the version before goes on with the file.
    one = response("s")
    counts.execute(INSERT, (one.id, "t", "s", "", 300.0, "completed", one.body, one.output, one.input, one.bytes_, ""))
    counts.commit()
    assert counts.execute("SELECT used_s, responses FROM sessions WHERE session = 's'").fetchall() == [(300.0, 3)]
    counts.close()


# ---- damage ----------------------------------------------------------------------------------------------------------
def damaged(store: Store, tmp_path: Path) -> Path:
    store.put(response("before"), 0.0)
    store.start_again()
    return tmp_path / "responses" / "responses.db.damaged"


def test_what_was_damaged_leaves_when_it_would_have_expired(store: Store, tmp_path: Path) -> None:
    file = damaged(store, tmp_path)
    now_s = file.stat().st_mtime
    store.sweep(now_s + DAY_S - 5)
    assert file.exists()
    store.sweep(now_s + DAY_S + 5)
    assert not list(file.parent.glob("*.damaged"))


def test_what_was_damaged_leaves_when_any_session_is_erased(store: Store, tmp_path: Path) -> None:
    file = damaged(store, tmp_path)
    assert file.exists() and store.forget("t", "before") == 0, "it is only there"
    assert not list(file.parent.glob("*.damaged"))


async def test_what_was_damaged_and_is_old_is_gone_soon_after_the_start(tmp_path: Path) -> None:
    folder = tmp_path / "responses"
    folder.mkdir()
    file = folder / "responses.db-wal.damaged"
    file.write_bytes(b"text")
    os.utime(file, (0, 0))
    made = keeper(tmp_path)
    await watched(made, lambda: not file.exists())
    await made.close()


class _Counted(str):
    """A session's id that counts how often it is compared."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        _Counted.compared += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


async def test_a_sessions_names_are_forgotten_without_a_look_at_all_others(tmp_path: Path) -> None:
    made = keeper(tmp_path, keep_s=0)
    for number in range(1000):
        made.note("t", f"resp_{number}", _Counted(f"s{number}"))
    _Counted.compared = 0
    await made.forget("t", "s7")
    await made.forget("t", "unknown")
    assert _Counted.compared < 20
    assert await made.session("t", "resp_7") is None and await made.session("t", "resp_8") == "s8"
    await made.close()


def test_names_of_sessions_are_bounded_and_agree_whatever_happens() -> None:
    draw, names = random.Random(4), NamedSessions(20)
    for _ in range(2000):
        tenant, session, one = draw.choice("tu"), f"s{draw.randrange(5)}", f"resp_{draw.randrange(60)}"
        match draw.randrange(10):
            case 0:
                names.forget(tenant, session)
            case 1:
                names.drop(tenant, one)
            case _:
                names.note(tenant, one, session)
        names.validate()
