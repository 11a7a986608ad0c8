"""The turn of an advised session goes where its hint's answer said, without another question, and the scheduler hears
of it."""

from __future__ import annotations

from typing import Any

import pytest
from gateway_fakes import MODEL, Stack, stack, until

from contracts.ids import SessionKey
from contracts.placement import LEAVES_CACHE_REQUESTS
from gateway.core.route_hints import FRESH_S, LOOK_S, RouteHints
from gateway.core.routing import FleetView, NodeView, Route

A, B = SessionKey("t", "a"), SessionKey("t", "b")
ROUTE = Route("n0", "a0", ("n1",), from_hint=True)


def fleet(first: int = 0, second: int = 0, **of_first: Any) -> FleetView:
    return FleetView(
        (
            NodeView("n0", "a0", **{"serving": True, "running": first, **of_first}),
            NodeView("n1", "a1", True, running=second),
        ),
        2,
    )


class Own:
    """The gateway's own requests by node, where a stream stands."""

    def __init__(self, **in_flight: int) -> None:
        self.in_flight = in_flight

    def flights_on(self, node: str) -> int | None:
        return self.in_flight.get(node)


def taken(
    route_hints: RouteHints, view: FleetView | None = None, at_s: float = 1.0, own: Own | None = None
) -> Route | None:
    return route_hints.take(A, "m", view or fleet(), own or Own(n0=0, n1=0), at_s)


@pytest.fixture
def route_hints() -> Any:
    made = RouteHints()
    made.note(A, ROUTE, 0.0)
    yield made
    made.validate()


def test_a_route_hint_serves_one_turn(route_hints: RouteHints) -> None:
    assert taken(route_hints) == ROUTE and taken(route_hints) is None


def test_an_old_route_hint_and_a_withdrawn_one_are_not_used(route_hints: RouteHints) -> None:
    assert taken(route_hints, at_s=FRESH_S + 0.1) is None
    route_hints.note(A, ROUTE, 0.0)
    route_hints.forget(A)
    assert taken(route_hints) is None
    route_hints.note(A, ROUTE, 0.0)
    route_hints.note(A, None, 0.5)
    assert taken(route_hints) is None


@pytest.mark.parametrize(
    "wrong", [{"serving": False}, {"models": frozenset({"other"})}, {"worker_address": "elsewhere"}]
)
def test_a_node_that_does_not_serve_is_not_taken(route_hints: RouteHints, wrong: dict[str, Any]) -> None:
    address = wrong.pop("worker_address", "a0")
    assert (
        taken(
            route_hints,
            FleetView((NodeView("n0", address, **{"serving": True, **wrong}), NodeView("n1", "a1", True)), 2),
        )
        is None
    )


def test_a_node_without_a_stream_or_one_that_is_clearly_busier_is_not_taken(route_hints: RouteHints) -> None:
    assert taken(route_hints, own=Own(n1=0)) is None
    route_hints.note(A, ROUTE, 0.0)
    assert taken(route_hints, fleet(LEAVES_CACHE_REQUESTS + 3, 2)) is None
    route_hints.note(A, ROUTE, 0.0)
    assert taken(route_hints, fleet(LEAVES_CACHE_REQUESTS + 2, 2)) == ROUTE
    route_hints.note(A, ROUTE, 0.0)
    assert taken(route_hints, own=Own(n0=LEAVES_CACHE_REQUESTS + 1, n1=0)) is None, (
        "its own requests count too, before they are reported"
    )
    route_hints.note(A, ROUTE, 0.0)
    assert taken(route_hints, own=Own(n0=LEAVES_CACHE_REQUESTS + 1, n1=1)) == ROUTE
    assert route_hints.take(B, "m", fleet(), Own(n0=0), 1.0) is None


def test_all_nodes_are_looked_at_now_and_then_only(route_hints: RouteHints) -> None:
    view, own = fleet(), Own(n0=0, n1=0)
    assert taken(route_hints, view, 1.0, own) == ROUTE
    own.in_flight = {"n0": LEAVES_CACHE_REQUESTS + 1, "n1": LEAVES_CACHE_REQUESTS}
    route_hints.note(A, ROUTE, 1.0)
    assert taken(route_hints, view, 1.0 + LOOK_S / 2, own) is None, "the least is still that of a moment ago"
    route_hints.note(A, ROUTE, 1.0)
    assert taken(route_hints, view, 1.0 + LOOK_S * 2, own) == ROUTE


@pytest.fixture
async def s() -> Any:
    async with stack() as running:
        running.scheduler.route_hints = 1
        yield running


async def hinted(s: Stack) -> None:
    await s.post("/v1/advisory", {"session_id": "a"})
    assert s.gateway.parts is not None
    await until(lambda: len(s.gateway.parts.fleet.route_hints) == 1)  # type: ignore[union-attr]


async def test_a_hinted_turn_does_not_wait_for_the_scheduler_and_is_told_to_it(s: Stack) -> None:
    await hinted(s)
    status, _, headers = await s.chat(session_id="a")
    assert (status, headers["X-Upbeat-Node"]) == (200, "node-1")
    assert s.workers[1].submitted[0].source_nodes == ["node-8"] and s.workers[1].submitted[0].kept_tokens == 800
    await until(lambda: bool(s.scheduler.placed))
    told = s.scheduler.placed[0]
    assert (told.taken, told.pin_node, told.model, told.session.session_id) == (True, "node-1", MODEL, "a")
    assert told.request_id == s.workers[1].submitted[0].request_id
    await s.chat(session_id="a")
    assert not s.scheduler.placed[1].taken and s.workers[0].submitted


async def test_a_hinted_node_that_fails_is_avoided_like_any_other(s: Stack) -> None:
    await hinted(s)
    s.workers[1].die_after = 1
    status, body, headers = await s.chat(session_id="a")
    assert (status, headers["X-Upbeat-Node"]) == (200, "node-0") and len(
        body["choices"][0]["message"]["content"].split()
    ) == 5
    # The scheduler may be told of the route hint's use after it was asked for another node.
    assert ["node-1"] in [list(p.avoid_nodes) for p in s.scheduler.placed]


async def test_a_pinned_turn_and_an_agents_turn_are_asked_for(s: Stack) -> None:
    await hinted(s)
    await s.chat(session_id="a", headers={"X-Upbeat-Node": "node-0"})
    await s.chat(session_id="a", headers={"X-Upbeat-Workflow": "w", "X-Upbeat-Agent": "x"})
    assert [p.taken for p in s.scheduler.placed] == [False, False]


async def test_a_withdrawn_hint_leaves_no_route_hint(s: Stack) -> None:
    await hinted(s)
    await s.post("/v1/invalidate", {"session_id": "a"})
    await until(lambda: bool(s.scheduler.invalidated))
    await s.chat(session_id="a")
    assert not s.scheduler.placed[0].taken
