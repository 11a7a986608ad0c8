"""Stored responses: whose they are, how long and how many, and what a damaged or shared store does."""

from __future__ import annotations

import asyncio
import json
import stat
import time
from dataclasses import replace
from pathlib import Path

import pytest
from stored_responses import DAY_S, MOST, keeper, response, watched

from contracts.errors import InvalidRequest, NotFound
from gateway.responses import keeper as module
from gateway.responses.ids import item_id, new_response_id, response_of
from gateway.responses.store import ROW_BYTES, Response, Store
from gateway.responses.stored_items import TooLong
from gateway.translating import NeedsStored


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "responses", DAY_S, 1 << 20, 0.5)


def test_a_tenants_responses_are_nobody_elses(store: Store) -> None:
    mine = response()
    assert store.put(mine, 0.0) and store.get("t", mine.id, 0.0) is not None
    assert store.get("u", mine.id, 0.0) is None and store.earlier("u", mine.id, 0.0, MOST) is None
    assert (
        list(store.items.named("u", [item_id(mine.id, "message", 0)], 0.0, MOST)) == [{}]
        and store.session("u", mine.id, 0.0) is None
    )
    assert not store.delete("u", mine.id) and not store.forget("u", "s")
    store.cancel("u", mine.id)
    assert store.get("t", mine.id, 0.0) is not None


def test_a_conversation_lives_as_long_as_it_is_used(store: Store) -> None:
    first = response()
    second = response(previous=first.id)
    store.put(first, 0.0)
    store.put(second, 10.0)
    assert store.sweep(DAY_S - 1) == 0
    found = store.earlier("t", second.id, DAY_S - 1, MOST)
    assert found is not None and found.whole and [i["type"] for i in json.loads(found.items)] == ["message"] * 4
    assert store.sweep(DAY_S + 100) == 0, "its beginning too was used with its end"
    assert store.get("t", first.id, 2 * DAY_S) is None, "what has expired is not there, swept or not"
    assert store.sweep(2 * DAY_S) == 2


def test_a_tenant_that_has_too_much_loses_its_own_oldest_session_whole(store: Store) -> None:
    other = response(tenant="u")
    store.put(other, 0.0)
    old = [response("old", size=50_000) for _ in range(3)]
    for i, one in enumerate(old):
        store.put(one, 1.0 + i)
    kept = [response(f"new-{i}", size=50_000) for i in range(8)]
    for one in kept:
        store.put(one, 10.0)
    assert not any(store.get("t", one.id, 20.0) for one in old)
    assert store.get("t", kept[-1].id, 20.0) is not None and store.get("u", other.id, 20.0) is not None


def test_all_together_keep_to_the_limit(store: Store) -> None:
    made = [response(tenant=tenant, size=150_000, session=f"s{i}") for i in range(3) for tenant in "abc"]
    for i, one in enumerate(made):
        store.put(one, float(i))
    held = [one for one in made if store.get(one.tenant, one.id, 10.0)]
    assert sum(one.bytes_ for one in held) <= 1 << 20 and made[-1] in held


def test_what_is_larger_than_a_share_is_not_stored_and_costs_nobody_anything(store: Store) -> None:
    small = response()
    store.put(small, 0.0)
    assert not store.put(response(size=600_000), 0.0) and store.get("t", small.id, 0.0) is not None


def test_a_count_of_small_ones_is_bounded_too(tmp_path: Path) -> None:
    store = Store(tmp_path, DAY_S, 64 * ROW_BYTES, 1.0)
    made = [response(f"s{i}", size=0) for i in range(100)]
    for i, one in enumerate(made):
        store.put(one, float(i))
    assert 40 < sum(store.get("t", one.id, 200.0) is not None for one in made) < 64


def test_several_processes_share_it(tmp_path: Path) -> None:
    one, other = (Store(tmp_path, DAY_S, 1 << 20, 1.0) for _ in range(2))
    made = response(status="in_progress", runner="p0")
    one.put(made, 0.0)
    assert other.get("t", made.id, 0.0) is not None and one.running("p0") == {made.id}
    other.cancel("t", made.id)
    assert one.running("p0") == set() and not one.settle(made, 1.0), "what was cancelled stays so"
    again = response(status="queued", runner="p0")
    one.put(again, 0.0)
    other.bury("p0")
    assert other.get("t", again.id, 0.0).status == "failed"  # type: ignore[union-attr]


def test_deleted_text_is_gone_from_the_disk(store: Store, tmp_path: Path) -> None:
    made = response("gone", size=0)
    made.input = json.dumps([{"type": "message", "role": "user", "content": [{"text": "SECRET" * 50}]}]).encode()
    store.put(made, 0.0)
    store.put(response("kept"), 0.0)
    assert store.forget("t", "gone") == 1
    files = list((tmp_path / "responses").iterdir())
    assert files and not any(b"SECRETSECRET" in path.read_bytes() for path in files)
    assert stat.S_IMODE((tmp_path / "responses").stat().st_mode) == 0o700
    assert all(stat.S_IMODE(path.stat().st_mode) & 0o077 == 0 for path in files)


def test_an_items_id_names_its_response() -> None:
    made = new_response_id()
    assert response_of(item_id(made, "message", 3)) == response_of(item_id(made, "reasoning", 9, of_input=True)) == made
    assert response_of("msg_1") is None and response_of("msg_" + "0" * 35) is None


# ---- the event loop's side -------------------------------------------------------------------------------------------
async def test_it_survives_a_restart(tmp_path: Path) -> None:
    first = keeper(tmp_path)
    made = response()
    assert await first.put(made)
    await first.close()
    second = keeper(tmp_path)
    assert (await second.get("t", made.id)).session == "s" and await second.session("t", made.id) == "s"
    _, session, _ = await second.named("t", NeedsStored(made.id), MOST)
    assert session == "s"
    await second.close()


async def test_a_damaged_store_costs_its_memory_and_nothing_else(tmp_path: Path) -> None:
    first = keeper(tmp_path)
    made = response()
    await first.put(made)
    await first.close()
    (tmp_path / "responses" / "responses.db").write_bytes(b"not a database" * 1000)
    second = keeper(tmp_path)
    assert not await second.put(response()), "the response is answered, not stored"
    with pytest.raises(NotFound):
        await second.get("t", made.id)
    again = response()
    assert await second.put(again) and (await second.get("t", again.id)).id == again.id
    assert (tmp_path / "responses" / "responses.db.damaged").exists()
    await second.close()


async def test_a_store_that_cannot_be_written_costs_no_answer(tmp_path: Path) -> None:
    (tmp_path / "responses").write_text("a file where the folder should be")
    made = keeper(tmp_path)
    assert not await made.put(response())
    await made.close()


async def test_without_a_store_nothing_is_kept(tmp_path: Path) -> None:
    made = keeper(tmp_path, keep_s=0)
    with pytest.raises(NotFound):
        await made.get("t", new_response_id())
    with pytest.raises(InvalidRequest) as unknown:
        await made.named("t", NeedsStored(new_response_id()), MOST)
    assert unknown.value.code == "previous_response_not_found" and not (tmp_path / "responses").exists()
    made.note("t", "resp_1", "s")
    assert await made.session("t", "resp_1") == "s", "a hint may name it all the same"
    await made.close()


async def test_a_store_that_is_turned_off_is_deleted(tmp_path: Path) -> None:
    before = keeper(tmp_path)
    assert await before.put(response())
    await before.close()
    folder = tmp_path / "responses"
    for tail in ("", "-wal"):
        (folder / f"responses.db{tail}.damaged").write_bytes(b"text")
    off = keeper(tmp_path, keep_s=0)
    await off.watch()
    assert not list(folder.glob("responses.db*"))
    await off.watch()  # nothing is there: nothing happens
    await off.close()


def test_what_a_request_names_is_not_read_beyond_its_bytes(store: Store) -> None:
    made = [response(size=10_000) for _ in range(3)]
    for one in made:
        store.put(one, 0.0)
    ids = [item_id(one.id, "message", 0, of_input=True) for one in made]
    [found] = store.items.named("t", ids, 0.0, 40_000)
    assert [json.loads(found[one])["id"] for one in ids] == ids
    for wanted in (ids, [ids[0]] * 3):  # also one that is named again and again
        with pytest.raises(TooLong):
            list(store.items.named("t", wanted, 0.0, 29_000))
    with pytest.raises(TooLong):
        store.earlier("t", made[0].id, 0.0, 9_000)


def test_input_is_read_a_page_at_a_time(store: Store) -> None:
    kinds = ["message", "function_call", "function_call_output", "message", "reasoning"]
    made = replace(response(), input=json.dumps([{"type": kind, "n": i} for i, kind in enumerate(kinds)]).encode())
    store.put(made, 0.0)
    every = [item_id(made.id, kind, i, of_input=True) for i, kind in enumerate(kinds)]
    for latest_first in (False, True):
        seen: list[str] = []
        while True:
            found = store.items.page("t", made.id, 0.0, seen[-1] if seen else None, 2, latest_first=latest_first)
            assert found is not None and all(json.loads(item)["id"] == name for name, item in found[0])
            seen += [name for name, _ in found[0]]
            assert found[1] is (len(seen) < 5)
            if not found[1]:
                break
        assert seen == (every[::-1] if latest_first else every)
    assert store.items.page("t", new_response_id(), 0.0, None, 2, latest_first=True) is None
    for after in (every[0][:-4] + "8fff", item_id(made.id, "message", 1, of_input=True), "nothing"):
        with pytest.raises(KeyError):
            store.items.page("t", made.id, 0.0, after, 2, latest_first=True)


def test_a_session_in_use_stays_although_its_turns_do_not_name_each_other(store: Store) -> None:
    first, idle, last = (
        response("active", size=150_000),
        response("idle", size=150_000),
        response("active", size=150_000),
    )
    store.put(first, 0.0)
    store.put(idle, 100.0)
    store.put(last, 200.0)
    store.put(response("new", size=150_000), 201.0)
    assert store.get("t", idle.id, 201.0) is None and store.get("t", first.id, 201.0) is not None


def test_a_session_in_which_something_runs_goes_last(store: Store) -> None:
    running, idle = response("running", size=200_000, status="queued", runner="p0"), response("idle", size=200_000)
    store.put(running, 0.0)
    store.put(idle, 100.0)
    store.put(response("new", size=200_000), 200.0)
    assert store.get("t", idle.id, 200.0) is None and store.get("t", running.id, 200.0) is not None


HEAD = {"object": "response", "created_at": 1, "status": "queued", "background": True, "error": None, "model": "m"}


def test_a_response_whose_process_died_says_so(store: Store) -> None:
    made = response(status="queued", runner="p0")
    said = json.dumps(
        {"id": made.id} | HEAD | {"instructions": '"status":"queued","error":null'}, separators=(",", ":")
    )
    store.put(replace(made, body=said.encode()), 0.0)
    found = store.get("t", made.id, 0.0)
    assert found is not None and found.background and json.loads(found.shown())["status"] == "queued"
    store.bury("p0")
    shown = json.loads(store.get("t", made.id, 0.0).shown())  # type: ignore[union-attr]
    assert (shown["status"], shown["error"]["code"]) == ("failed", "server_error")
    assert shown["instructions"] == '"status":"queued","error":null' and shown["output"][0]["type"] == "message"


async def test_nothing_runs_for_ever_when_its_end_is_lost_or_its_process_has_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOOK_S", 0.02)
    monkeypatch.setattr(module, "SWEEP_S", 0.1)
    monkeypatch.setattr(module, "BEAT_S", 0.05)
    made, other = keeper(tmp_path), Store(tmp_path / "responses", DAY_S, 1 << 20, 0.5)
    lost, dead, lives = (response(f"s{n}", status="queued", runner=name) for n, name in enumerate(("p0", "p7", "p0")))
    for one in (lost, dead):
        other.put(one, time.time())
    gate = asyncio.Event()

    async def work() -> None:
        await gate.wait()

    assert await made.run(lives, work)

    def status(one: Response) -> str:
        return other.get("t", one.id, time.time()).status  # type: ignore[union-attr]

    await watched(made, lambda: status(lost) == status(dead) == "failed")
    assert status(lives) == "queued"
    gate.set()
    await made.close()


def test_a_process_that_finds_the_store_damaged_does_not_put_another_ones_new_store_aside(tmp_path: Path) -> None:
    one, two = (Store(tmp_path / "responses", DAY_S, 1 << 20, 0.5) for _ in range(2))
    for store in (one, two):
        store.sweep(0.0)
    one.start_again()
    made = response()
    one.put(made, 0.0)
    two.start_again()
    assert two.get("t", made.id, 0.0) is not None
