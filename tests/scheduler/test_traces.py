"""A scheduler's spans and log lines about single requests, and a hint's trace on its way to its store and its turn."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from contracts.trace_context import TraceContext, from_wire
from contracts.v1 import common_pb2, scheduler_pb2
from runtime.spans import Kind
from tests.scheduler.test_server import World, key
from tests.scheduler.test_server import world as world
from tests.traced import Recorder, is_below, recording

TURN, HINT = TraceContext("1" * 32, "1" * 16), TraceContext("2" * 32, "2" * 16, state="a=1")


def advisory(trace: str, advisory_id: str = "a1") -> scheduler_pb2.AdviseRequest:
    made = common_pb2.Advisory(session=key("s"), ttl_s=60, advisory_id=advisory_id, trace=trace)
    return scheduler_pb2.AdviseRequest(advisories=[made])


async def test_a_hints_trace_reaches_its_store_and_its_turn(world: World) -> None:
    with recording() as spans:
        reply = await world.stub.Advise(advisory(HINT.to_wire()))
        assert reply.placements[0].hint_trace == HINT.to_wire(), "for a turn that does not ask"
        await world.stub.Advise(advisory("", "a2"))  # typing goes on, untraced
        node = next(n for n in world.nodes if n.name == reply.nodes[0])
        assert (await node.command("prefetch")).advisory.trace == HINT.to_wire()
        assert (await world.place("s", "r1")).hint_trace == HINT.to_wire()
        assert not (await world.place("s", "r2")).hint_trace, "a hint is good for one turn"
        placed = spans.one("scheduler.place_hint")
        assert is_below(placed, HINT) and placed.context.state == "a=1"
        assert placed.attributes == {"upbeat.node": reply.nodes[0], "upbeat.advisory_id": "a1"}
        assert len(spans.spans) == 1, "turns that are not traced have no span"


async def test_a_traced_turn_says_where_it_goes_and_why(world: World) -> None:
    with recording() as spans, capture_logs() as lines:
        placed = await world.place("s", "chatcmpl-1/mine-0", trace=TURN.to_wire())
        refused = await world.ask("s", "chatcmpl-2", model="unknown", trace=TURN.to_wire())
        assert refused.refused
        for bad in ("x", "00-" + "0" * 32, "y" * 100_000):
            await world.place("s", "r", trace=bad)
    span = spans.one("scheduler.place")
    assert is_below(span, TURN) and span.kind is Kind.SERVER and span.ended_s >= span.began_s
    assert span.attributes["upbeat.node"] == placed.node and span.attributes["upbeat.why"] == placed.why
    assert span.attributes["upbeat.request_id"] == "chatcmpl-1/mine-0"
    said = {line["request"]: line["event"] for line in lines if "request" in line}
    assert said["chatcmpl-1/mine-0"] == "placed" and said["chatcmpl-2"] == "not placed"


@pytest.mark.parametrize("on", [False, True])
async def test_placements_do_not_depend_on_traces(world: World, on: bool) -> None:
    async def ask() -> list[scheduler_pb2.Placement]:
        return [await world.place(f"s{n}", f"r{n}", trace=TURN.to_wire()) for n in range(4)]

    if not on:
        assert len({placement.node for placement in await ask()}) == 2
        return
    with recording() as spans:
        assert len({placement.node for placement in await ask()}) == 2
    assert isinstance(spans, Recorder) and len(spans.named("scheduler.place")) == 4
    assert from_wire(TURN.to_wire()) == TURN
