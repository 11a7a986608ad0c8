"""Stored responses: whose they are, how long and how many, and what a damaged or shared store does."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from contracts.errors import InvalidRequest, NotFound
from gateway.responses.ids import item_id, new_response_id, response_of
from gateway.responses.keeper import Keeper
from gateway.responses.store import ROW_BYTES, Response, Store
from gateway.translating import NeedsStored
from runtime.clock import Clock, RealClock

DAY_S = 86_400.0


def response(session: str = "s", tenant: str = "t", previous: str = "", size: int = 10, **more: str) -> Response:
    made = new_response_id()
    output = [{"id": item_id(made, "message", 0), "type": "message", "role": "assistant", "content": []}]
    items = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x" * size}]}]
    encoded = [json.dumps(part).encode() for part in ({"id": made}, output, items)]
    return Response(made, tenant, session, more.pop("status", "completed"), *encoded, previous, **more)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "responses", DAY_S, 1 << 20, 0.5)


def test_a_tenants_responses_are_nobody_elses(store: Store) -> None:
    mine = response()
    assert store.put(mine, 0.0) and store.get("t", mine.id, 0.0) is not None
    assert store.get("u", mine.id, 0.0) is None and store.earlier("u", mine.id, 0.0) is None
    assert store.items("u", [item_id(mine.id, "message", 0)], 0.0) == {} and store.session("u", mine.id, 0.0) is None
    assert not store.delete("u", mine.id) and not store.forget("u", "s")
    store.cancel("u", mine.id)
    assert store.get("t", mine.id, 0.0) is not None


def test_a_conversation_lives_as_long_as_it_is_used(store: Store) -> None:
    first = response()
    second = response(previous=first.id)
    store.put(first, 0.0)
    store.put(second, 10.0)
    assert store.sweep(DAY_S - 1) == 0
    found = store.earlier("t", second.id, DAY_S - 1)
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
    assert other.abandon("p0") == 1 and other.get("t", again.id, 0.0).status == "failed"  # type: ignore[union-attr]


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
def keeper(data: Path, clock: Clock | None = None, keep_s: float = DAY_S) -> Keeper:
    return Keeper(data, clock or RealClock(), keep_s, 1 << 20, 1.0, "p0")


async def test_it_survives_a_restart(tmp_path: Path) -> None:
    first = keeper(tmp_path)
    made = response()
    assert await first.put(made)
    await first.close()
    second = keeper(tmp_path)
    assert (await second.get("t", made.id)).session == "s" and await second.session("t", made.id) == "s"
    _, session = await second.named("t", NeedsStored(made.id))
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
        await made.named("t", NeedsStored(new_response_id()))
    assert unknown.value.code == "previous_response_not_found" and not (tmp_path / "responses").exists()
    made.note("t", "resp_1", "s")
    assert await made.session("t", "resp_1") == "s", "a hint may name it all the same"
    await made.close()
