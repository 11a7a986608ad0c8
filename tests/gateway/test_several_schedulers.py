"""Sessions are shared among schedulers; the next one stands in for one that dies, hangs or gathers; without any, the
gateway routes."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from gateway_fakes import MODEL, Stack, ToyScheduler, stack, until

from contracts.ids import DEFAULT_TENANT, SessionKey
from contracts.rendezvous import rendezvous
from gateway.core.routing import FleetView, LastNodes, NodeView, direct_route, following

NAMES = [f"s{n}" for n in range(40)]


@pytest.fixture
async def s() -> AsyncIterator[Stack]:
    async with stack(schedulers=3) as running:
        yield running


def owners(s: Stack, name: str) -> list[ToyScheduler]:
    """The session's scheduler and its heirs, in order."""
    at = dict(zip(s.config.scheduler_addresses, s.schedulers, strict=True))
    return [at[address] for address in rendezvous(SessionKey(DEFAULT_TENANT, name), at)]


def placed(scheduler: ToyScheduler) -> set[str]:
    return {p.session.session_id for p in scheduler.placed}


async def say(s: Stack, *names: str) -> None:
    for name in names:
        status, _, headers = await s.chat(headers={"X-Session-Id": name})
        assert status == 200, headers


async def test_every_session_is_placed_by_its_own_scheduler(s: Stack) -> None:
    await say(s, *NAMES)
    for n, scheduler in enumerate(s.schedulers):
        assert placed(scheduler) == {name for name in NAMES if owners(s, name)[0] is scheduler} != set(), n


@pytest.mark.parametrize("how", ["dies", "hangs", "gathers"])
async def test_of_a_scheduler_that_does_not_answer_only_its_share_moves_and_comes_back(s: Stack, how: str) -> None:
    lost = s.schedulers[1]
    if how == "dies":
        await lost.kill()
    else:
        setattr(lost, {"hangs": "hang", "gathers": "gathering"}[how], True)
    await say(s, *NAMES)
    for scheduler in (s.schedulers[0], s.schedulers[2]):
        left = {name: next(o for o in owners(s, name) if o is not lost) for name in NAMES}
        assert placed(scheduler) == {name for name, owner in left.items() if owner is scheduler}
    assert s.workers[0].submitted and not placed(lost)
    if how == "dies":
        await lost.start()
    lost.hang = lost.gathering = False
    mine = next(name for name in NAMES if owners(s, name)[0] is lost)

    async def back() -> bool:
        await say(s, mine)
        return placed(lost) == {mine}

    await until(back)


async def test_the_fleet_is_followed_through_another_scheduler_when_one_dies(s: Stack) -> None:
    await s.schedulers[0].kill()
    s.schedulers[1].set_absent("node-0")
    s.schedulers[2].set_absent("node-0")

    async def seen() -> bool:
        return (await s.missing()) == ["1 of 2 nodes serve", "node-0 does not serve"]

    await until(seen)


async def test_the_fleet_is_followed_through_another_scheduler_when_one_hangs_though_its_stream_stands(
    s: Stack,
) -> None:
    s.schedulers[0].hang = True
    for other in s.schedulers[1:]:
        other.set_absent("node-0")
    mine = next(name for name in NAMES if owners(s, name)[0] is s.schedulers[0])
    await say(s, mine)

    async def seen() -> bool:
        return (await s.missing()) == ["1 of 2 nodes serve", "node-0 does not serve"]

    await until(seen)


async def test_hints_go_to_the_sessions_schedulers_and_to_the_next_one_when_that_is_away(s: Stack) -> None:
    lost = s.schedulers[0]
    await lost.kill()
    for name in NAMES:
        assert (await s.post("/v1/advisory", {"session_id": name}))[0] == 202
    heirs = {name: next(o for o in owners(s, name) if o is not lost) for name in NAMES}
    await until(lambda: sum(len(x.advised) for x in s.schedulers) == len(NAMES))
    for scheduler in s.schedulers[1:]:
        assert {a.session.session_id for a in scheduler.advised} == {
            name for name, heir in heirs.items() if heir is scheduler
        }


async def test_an_invalidation_reaches_the_scheduler_that_knows_the_hint(s: Stack) -> None:
    name = NAMES[0]
    first, second, third = owners(s, name)
    second.knows_hints = True  # it stood in for the first when the hint came
    await s.post("/v1/invalidate", {"session_id": name})
    await until(lambda: bool(second.invalidated))
    assert len(first.invalidated) == 1 and not third.invalidated
    assert (await s.post("/v1/invalidate", {"advisory_id": "adv-1"}))[0] == 202
    await until(lambda: len(second.invalidated) == 2)


async def test_an_erasure_goes_to_one_scheduler_which_tells_the_stores(s: Stack) -> None:
    async with s.http.delete(f"{s.url}/v1/sessions/chat-1") as r:
        assert r.status == 200
    assert [len(x.erased) for x in owners(s, "chat-1")] == [1, 0, 0]
    await owners(s, "chat-1")[0].kill()
    async with s.http.delete(f"{s.url}/v1/sessions/chat-1") as r:
        assert r.status == 200
    assert [len(x.erased) for x in owners(s, "chat-1")] == [1, 1, 0]


async def test_the_list_of_sessions_names_each_once_and_the_fleet_names_every_scheduler(s: Stack) -> None:
    status, found = await s.get("/v1/sessions")
    assert status == 200 and [x["id"] for x in found["data"]] == ["chat-1"]
    await s.schedulers[2].kill()
    s.schedulers[1].gathering = True
    s.schedulers[1].set_absent()
    status, fleet = await s.get("/v1/fleet")
    assert [x["state"] for x in fleet["schedulers"]] == ["serving", "gathering", "silent"]
    assert [x["address"] for x in fleet["schedulers"]] == list(s.config.scheduler_addresses)


async def test_without_any_scheduler_sessions_stay_on_the_node_that_served_them() -> None:
    async with stack(3) as s:
        homes = {}
        for n, name in enumerate(NAMES):
            _, _, headers = await s.chat(headers={"X-Session-Id": name, "X-Upbeat-Node": f"node-{n % 3}"})
            homes[name] = headers["X-Upbeat-Node"]
        assert len(set(homes.values())) == 3
        await s.scheduler.kill()
        for name in NAMES:
            status, _, headers = await s.chat(headers={"X-Session-Id": name})
            assert status == 200 and headers["X-Upbeat-Node"] == homes[name]


async def test_a_scheduler_that_gathers_does_not_make_the_gateway_forget_its_fleet() -> None:
    async with stack(2) as s:
        s.scheduler.gathering = True
        s.scheduler.set_absent("node-0", "node-1")
        for name in NAMES[:4]:
            await say(s, name)
        assert not s.scheduler.placed and {r.model for w in s.workers for r in w.submitted} == {MODEL}


# ---- the pure part ---------------------------------------------------------------------------------------------------


def node(name: str, *, serving: bool = True, running: int = 0) -> NodeView:
    return NodeView(name, f"{name}:1", serving, running=running)


def test_a_sessions_node_is_preferred_until_it_is_clearly_busier() -> None:
    connected = {"a", "b"}
    for running, chosen in ((0, "b"), (4, "b"), (5, "a")):
        route = direct_route(FleetView((node("a"), node("b", running=running))), "m", {}, connected, last="b")
        assert route is not None and route.node == chosen
        assert route.source_nodes == (("b",) if chosen == "a" else ()), "its cache can be had from there"
    gone = direct_route(FleetView((node("a"), node("b", serving=False))), "m", {}, connected, last="b")
    assert gone is not None and gone.node == "a"
    apart = direct_route(FleetView((node("a"), node("b"))), "m", {}, {"a"}, last="b")
    assert apart is not None and apart.node == "a", "a node without a stream comes last"
    avoided = direct_route(FleetView((node("a"), node("b"))), "m", {}, connected, avoid=["b"], last="b")
    assert avoided is not None and avoided.node == "a"


def test_the_nodes_of_the_latest_sessions_are_remembered() -> None:
    last = LastNodes(2)
    keys = [SessionKey("t", name) for name in "abc"]
    for key in keys[:2]:
        last.note(key, "node-0")
    last.note(keys[0], "node-1")
    last.note(keys[2], "node-2")
    assert [last.get(key) for key in keys] == ["node-1", "", "node-2"]


def test_while_a_scheduler_gathers_nodes_that_it_has_not_found_yet_are_kept() -> None:
    before = FleetView((node("a"), node("b"), node("c", serving=False)), 3)
    now = FleetView((node("a", running=3), node("b", serving=False)), 3)
    kept = following(before, now, gathering=True)
    assert [(n.name, n.serving, n.running) for n in kept.nodes] == [("a", True, 3), ("b", True, 0), ("c", False, 0)]
    assert following(before, now, gathering=False) is now and following(None, now, gathering=True) is now
