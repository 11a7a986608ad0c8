"""Tenants have turns at the stored responses: what one of them asks for makes no other wait for all of it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from stored_responses import MOST, keeper, response

from contracts.errors import RateLimited
from gateway import store_thread as module
from gateway.envelope import error_response
from gateway.responses import stored_items
from gateway.responses.ids import item_id
from gateway.store_thread import StoreThread
from gateway.translating import NeedsStored


async def test_beyond_its_bound_a_tenants_reads_are_refused_and_its_answers_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "WAITING", 3)
    thread, gate, done = StoreThread(), threading.Event(), list[str]()

    def ask(owner: str, name: str, *, always: bool = False) -> asyncio.Future[None]:
        return asyncio.ensure_future(thread.run(owner, lambda: done.append(name), always=always))

    asked = [asyncio.ensure_future(thread.run("a", gate.wait)), ask("a", "a0"), ask("a", "a1")]
    await asyncio.sleep(0)
    with pytest.raises(RateLimited) as refused:
        await ask("a", "too many")
    assert error_response(refused.value).status == 429 and error_response(refused.value).headers["Retry-After"] == "1"
    asked += [ask("a", "kept", always=True), ask("b", "b0")]
    await asyncio.sleep(0)
    gate.set()
    await asyncio.gather(*asked)
    assert sorted(done) == ["a0", "a1", "b0", "kept"]
    await ask("a", "later")
    assert done[-1] == "later", "they count until they have a result"
    await thread.close(lambda: None)


async def test_a_keeper_keeps_an_answer_when_its_tenant_may_read_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WAITING", 0)
    made, mine = keeper(tmp_path), response()
    assert await made.put(mine)
    reads: list[Callable[[], object]] = [
        lambda: made.get("t", mine.id),
        lambda: made.delete("t", mine.id),
        lambda: made.forget("t", "s"),
        lambda: made.session("t", mine.id),
        lambda: made.input_page("t", mine.id, None, 5, latest_first=True),
        lambda: made.named("t", NeedsStored(mine.id), MOST),
        lambda: made.run(response(status="queued", runner="p0"), lambda: asyncio.sleep(0)),
    ]
    for read in reads:
        with pytest.raises(RateLimited):
            await read()  # type: ignore[misc]
    await made.close()


async def test_one_tenants_many_reads_do_not_delay_another_ones_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, mine = keeper(tmp_path), response(tenant="a")
    await made.put(mine)
    reads = [asyncio.ensure_future(made.get("a", mine.id)) for _ in range(500)]
    await asyncio.sleep(0)
    assert await made.put(response(tenant="b"))
    assert sum(read.done() for read in reads) < 100
    await asyncio.gather(*reads)
    await made.close()


async def test_a_request_that_names_many_responses_takes_many_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_items, "LOOKED", 2)
    made = keeper(tmp_path)
    stored = [response() for _ in range(6)]
    for one in stored:
        await made.put(one)
    turns, run = 0, StoreThread.run

    async def counted(self: StoreThread, *given: object, **more: object) -> object:
        nonlocal turns
        turns += 1
        return await run(self, *given, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(StoreThread, "run", counted)
    ids = [item_id(one.id, "message", 0) for one in stored]
    found = await made.named("t", NeedsStored("", ids), MOST)
    assert len(found.pieces) == 6 and turns == 4
    await made.close()
