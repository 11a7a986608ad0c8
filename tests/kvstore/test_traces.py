"""What a store records of traced requests, as its collector gets it; and ids of requests in its log."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from contracts.ids import SessionKey
from contracts.trace_context import TraceContext
from runtime.clock import VirtualClock
from tests.kvstore.fake_scheduler import FakeScheduler
from tests.kvstore.fake_worker import LIMIT_S, FakeWorker, assert_pieces, make_chunks, make_manifest, make_shape
from tests.traced import Receiver, attributes_of, recording

SHAPE, CHUNKS = make_shape(), 6
SESSION = SessionKey("default", "s")
SAVE, LOAD, HINT = (TraceContext(str(n) * 32, str(n) * 16).to_wire() for n in (1, 2, 3))


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as made:
        yield made


async def come(receiver: Receiver, *names: str) -> list[dict[str, Any]]:
    """The attributes of these spans, once all have come."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            found = {}
            for service, span in receiver.spans():
                assert service == "upbeat-kvstore"
                told = attributes_of(span)
                told["trace"] = span.trace_id.hex()[0] + span.parent_span_id.hex()[0]
                found[f"{span.name} {told.get('upbeat.kv.tier', '')}".strip()] = told
            if found.keys() >= set(names):
                return [found[name] for name in names]
            await asyncio.sleep(0.05)


async def test_loads_saves_and_hints_are_traced_and_logged(make_stack: Any, receiver: Receiver) -> None:
    telemetry = {"traces": True, "endpoint": receiver.url}
    stack = make_stack(nodes=1, telemetry=telemetry, log_level="debug", transport="socket")
    chunks = make_chunks(SHAPE, CHUNKS)
    async with FakeScheduler(stack.config.scheduler_addresses[0]) as scheduler:
        stack.start(0)
        async with FakeWorker(stack.address(0), [SHAPE]) as worker:
            await worker.save(SESSION, SHAPE, chunks, "chatcmpl-1/mine", SAVE)
            worker.turn(make_manifest(SESSION, SHAPE, list(chunks)))
            await worker.flush()
            loaded = await worker.load(SHAPE, list(chunks), request_id="chatcmpl-2", trace=LOAD)
            assert_pieces(loaded, SHAPE, chunks)
            await worker.load(SHAPE, [*chunks, b"?" * 32], request_id="chatcmpl-3")
            await scheduler.advise("node-0", "s", trace=HINT)
            await asyncio.wait_for(worker.offers.get(), LIMIT_S)
            load, ssd, blob, hint = await come(
                receiver, "store.load", "store.write_back ssd", "store.write_back blob", "store.prefetch"
            )
        log = [json.loads(line) for line in stack.log(0).splitlines() if line.startswith("{")]
    assert (load["trace"], load["upbeat.request_id"], load["upbeat.kv.usable_chunks"]) == ("22", "chatcmpl-2", CHUNKS)
    assert load["upbeat.kv.dram_chunks"] == CHUNKS and load["upbeat.kv.end"] == "ended"
    for written in (ssd, blob):
        assert (written["trace"], written["upbeat.request_id"]) == ("11", "chatcmpl-1/mine")
        assert written["upbeat.kv.written_chunks"] == written["upbeat.kv.chunks"] == CHUNKS
    assert (hint["trace"], hint["upbeat.kv.usable_chunks"]) == ("33", CHUNKS)
    assert len(receiver.spans()) == 4, "what is not traced has no span"
    lines = {line["request"]: line for line in log if "request" in line}
    assert lines["chatcmpl-1/mine"]["event"] == "save" and lines["chatcmpl-1/mine"]["chunks"] == CHUNKS
    assert lines["chatcmpl-3"]["event"] == "load" and (lines["chatcmpl-3"]["wanted"], lines["chatcmpl-3"]["found"]) == (
        CHUNKS + 1,
        CHUNKS,
    )


def test_what_is_remembered_is_bounded_and_goes_with_its_worker() -> None:
    from contracts.v1 import kvstore_pb2 as pb
    from kvstore import tracing as ours
    from kvstore.core.instructions import Grant

    with recording() as spans:
        clock = VirtualClock()
        traces = ours.StoreTraces(clock)
        for n in range(3 * ours._MOST_HINTS):
            traces.advised(SessionKey("t", str(n)), HINT)
        assert len(traces._hints) <= ours._MOST_HINTS
        for n in range(2 * ours._MOST_SAVES):
            traces.save(("w", n), pb.SaveRequest(save_id=n, keys=[bytes([n % 256]) * 32], trace=SAVE))
        assert len(traces._saves) == ours._MOST_SAVES
        for n in range(10):
            traces.load(("w", str(n)), pb.LoadRequest(load_id=n, trace=LOAD))
        traces.told(Grant(("w", 0), (0,), (0,), (), ()))
        traces.copied(("w", 0), [0])
        traces.gone("w")
        assert not traces._loads and not traces._saves
        assert [s.attributes["upbeat.kv.end"] for s in spans.named("store.load")] == ["cancelled"] * 10
        assert len(traces._writing) == 2, "what was copied is written, whoever is gone"


def test_a_save_that_is_never_written_gets_its_span_in_the_end() -> None:
    from contracts.v1 import kvstore_pb2 as pb
    from kvstore import tracing as ours
    from kvstore.core.instructions import Grant

    class Hand:
        at_s = 0.0

        def now(self) -> float:
            return self.at_s

    with recording() as spans:
        clock: Any = Hand()
        traces = ours.StoreTraces(clock)
        for n, at_s in enumerate((0.0, ours._UNWRITTEN_S + 1.0)):
            clock.at_s = at_s
            traces.save(("w", n), pb.SaveRequest(save_id=n, keys=[bytes([n]) * 32], request_id="r", trace=SAVE))
            traces.told(Grant(("w", n), (0,), (0,), (), ()))
            traces.copied(("w", n), [0, 7])
        written = spans.named("store.write_back")
        assert [(s.attributes["upbeat.kv.tier"], s.attributes["upbeat.kv.unwritten_chunks"]) for s in written] == [
            ("ssd", 1),
            ("blob", 1),
        ]
        assert len(traces._writing) == 2


def test_a_turn_that_comes_before_its_hints_load_has_ended_ends_its_span() -> None:
    from contracts.v1 import common_pb2
    from contracts.v1 import kvstore_pb2 as pb
    from kvstore import tracing as ours
    from kvstore.core.hints import ADVISORY
    from kvstore.core.instructions import End, Found

    with recording() as spans:
        traces = ours.StoreTraces(VirtualClock())
        assert traces.owners() == {ADVISORY: traces}
        asked = pb.LoadRequest(load_id=7, session=common_pb2.Session(tenant="default", session_id="s"))
        for number, ends in (("1", False), ("2", True)):
            traces.advised(SESSION, HINT)
            traces.answer(Found((ADVISORY, number), 4, False, (0, 1, 2, 3), session=SESSION))
            if ends:
                traces.answer(End((ADVISORY, number), 3))
            traces.load(("w", number), asked)
        found = [(s.attributes["upbeat.kv.end"], s.attributes["upbeat.kv.usable_chunks"]) for s in spans.spans]
        assert found == [("turn", 0), ("ended", 3)] and {s.name for s in spans.spans} == {"store.prefetch"}
        assert not traces._hinted and not traces._hints
