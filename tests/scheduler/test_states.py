"""How a node stands: leases, draining, nodes that come and go; and what a scheduler believes of sessions told by clocks
that differ."""

from __future__ import annotations

from dataclasses import replace

import pytest

from contracts.ids import SessionKey
from scheduler.core.attached import Attached, Stream
from scheduler.core.control import Ask, Prefetch
from scheduler.core.device import STALLED_AFTER_S, STARTING_S, LoadReport
from scheduler.core.directory import Held
from scheduler.core.fleet import DEAD_AFTER_S, STEADY_S
from scheduler.core.gathering import GATHER_S, Gathering
from tests.scheduler.test_core import MODEL, TOKEN_BYTES, Harness, S, hint

HOUR_S = 3600.0


def states(h: Harness, now: float) -> list[str]:
    h.tick(now)
    return [node.state(now) for node in h.fleet.devices.values()]


def here(tokens: int) -> Held:
    return Held(tokens, tokens * TOKEN_BYTES, tokens)


def test_a_node_is_starting_until_both_of_its_processes_were_here_and_absent_only_after() -> None:
    h = Harness(1)
    h.fleet.store_joined("node-9", "s9")
    assert h.fleet.devices["node-9"].state(0.0) == "starting", "before the first tick, too"
    assert states(h, 1.0)[1] == "starting"
    h.fleet.worker_joined("node-9", "w9", (MODEL,), 60.0)
    assert states(h, 60.0)[1] == "serving"
    h.fleet.store_left("node-9")
    assert states(h, 61.0)[1] == "absent", "it has started: what is missing has been lost"
    h.fleet.store_joined("node-9", "s9")
    h.fleet.worker_left("node-9", 62.0)
    assert states(h, 62.0)[1] == "absent"
    h.fleet.validate()


def test_a_node_that_never_comes_up_is_absent_in_the_end_and_watchers_hear_of_it() -> None:
    h = Harness(1)
    h.fleet.worker_joined("node-9", "w9", (MODEL,), 5.0)
    assert states(h, 5.0)[1] == "starting"
    assert states(h, 5.0 + STARTING_S - 1.0)[1] == "starting"
    seen = h.fleet.version
    assert states(h, 5.0 + STARTING_S)[1] == "absent" and h.fleet.version > seen
    assert not h.fleet.devices["node-9"].serving


def test_a_silent_node_is_suspect_then_dead_and_serves_again_when_it_reports() -> None:
    h = Harness()
    h.fleet.loaded("node-1", LoadReport(), [], [], 4.0)
    assert states(h, 4.0) == ["suspect", "serving"]
    h.fleet.loaded("node-1", LoadReport(), [], [], DEAD_AFTER_S + 1)
    assert states(h, DEAD_AFTER_S + 1) == ["dead", "serving"]
    h.fleet.loaded("node-0", LoadReport(), [], [], 20.0)
    h.fleet.loaded("node-1", LoadReport(), [], [], 20.0)
    assert states(h, 20.0) == ["serving", "serving"]


def test_a_node_whose_engine_stands_still_is_suspect_and_says_why() -> None:
    h = Harness()
    h.fleet.loaded("node-0", LoadReport(stalled_s=STALLED_AFTER_S + 0.1), ["r"], [], 1.0)
    h.fleet.loaded("node-1", LoadReport(stalled_s=STALLED_AFTER_S - 0.1), [], [], 1.0)
    assert states(h, 1.0) == ["suspect", "serving"] and [n.stalled(1.0) for n in h.fleet.devices.values()] == [
        "engine",
        "",
    ]
    assert h.place(Ask("new", S, "m"), 1.1).node == "node-1", "it gets work only if there is no other"
    assert h.fleet.devices["node-0"].stalled(5.0) == "silent"
    h.fleet.loaded("node-0", LoadReport(), [], [], 6.0)
    assert h.fleet.devices["node-0"].stalled(6.0) == "" and states(h, 6.0)[0] == "serving"
    h.fleet.validate()


def test_watchers_hear_of_a_state_that_only_time_has_changed() -> None:
    h = Harness()
    h.tick(0.5)
    seen = h.fleet.version
    h.tick(1.0)
    assert h.fleet.version == seen
    h.tick(4.0)
    assert h.fleet.version > seen


def test_a_draining_node_gets_nothing_new_and_its_hints_move_while_its_requests_go_on() -> None:
    h = Harness()
    h.place(Ask("running", SessionKey("t", "other"), "m", pin="node-0"), 0.0)
    h.fleet.loaded("node-0", LoadReport(running=1, outstanding_s=0.0), ["running"], [], 0.0)
    h.advise(hint(pin="node-0"), 0.0)
    pending = h.advisories.get(S)
    assert pending is not None
    h.advisories.place(replace(pending, hint=hint()))  # as if the scheduler had chosen the node
    h.fleet.drain("node-0")
    seen = h.fleet.version
    h.fleet.drain("node-0")
    assert h.fleet.version == seen, "what is known is no news"
    moved = [c for c in h.tick(0.5) if isinstance(c, Prefetch)]
    assert [c.node for c in moved] == ["node-1"] and states(h, 0.6) == ["draining", "serving"]
    assert h.place(Ask("new", S, "m"), 0.7).node == "node-1"
    assert h.fleet.devices["node-0"].outstanding == {"running"}
    h.worker_left("node-0", 1.0)
    assert states(h, 1.0)[0] == "absent"


def test_a_node_that_restarts_once_is_trusted_at_once_and_one_that_flaps_is_not() -> None:
    h = Harness()
    now = 0.0

    def leave_and_return() -> str:
        h.worker_left("node-0", now)
        h.fleet.worker_joined("node-0", "w0", (MODEL,), now + 0.1)
        h.fleet.loaded("node-1", LoadReport(), [], [], now + 0.1)
        return h.fleet.devices["node-0"].state(now + 0.1)

    assert leave_and_return() == "serving"
    waits = []
    for _ in range(4):
        now += 1.1
        assert leave_and_return() == "suspect"
        waits.append(h.fleet.devices["node-0"].trusted_s - (now + 0.1))
        assert {h.place(Ask(f"r{now}-{i}", SessionKey("t", str(i)), "m"), now + 0.2).node for i in range(4)} == {
            "node-1"
        }
    assert waits == [pytest.approx(w) for w in (1.0, 2.0, 4.0, 8.0)]
    back = h.fleet.devices["node-0"].trusted_s
    h.fleet.loaded("node-0", LoadReport(), [], [], back)
    assert h.fleet.devices["node-0"].state(back) == "serving", "a moment of quiet and it is trusted"
    now = back + STEADY_S
    assert leave_and_return() == "serving", "what it did long ago is forgotten"


def test_an_unsteady_node_gets_work_when_there_is_no_other() -> None:
    h = Harness(1)
    for now in (1.0, 2.0, 3.0):
        h.worker_left("node-0", now)
        h.fleet.worker_joined("node-0", "w0", (MODEL,), now)
    assert h.fleet.devices["node-0"].state(3.0) == "suspect"
    assert h.place(Ask("r", S, "m"), 3.0).node == "node-0"


def test_hints_do_not_follow_a_flapping_node_back_and_forth() -> None:
    h = Harness()
    h.advise(hint(expires_s=60.0), 0.0)
    moves = 0
    for second in range(1, 20):
        h.worker_left("node-0", second)
        moves += sum(isinstance(c, Prefetch) for c in h.tick(second + 0.1))
        h.fleet.worker_joined("node-0", "w0", (MODEL,), second + 0.2)
        h.fleet.loaded("node-1", LoadReport(), [], [], second + 0.2)
        moves += sum(isinstance(c, Prefetch) for c in h.tick(second + 0.5))
    assert moves <= 1
    pending = h.advisories.get(S)
    assert pending is not None and pending.node == "node-1"


def test_a_scheduler_gathers_until_its_nodes_are_there_or_the_time_is_up() -> None:
    both, one, none = Harness(2).fleet, Harness(1).fleet, Harness(0).fleet
    gathering = Gathering(10.0)
    assert gathering.lasts(10.5, one, 2)
    assert not gathering.lasts(11.0, both, 2) and not gathering.lasts(11.1, none, 2), "it is over once"
    late = Gathering(10.0)
    assert late.lasts(10.0 + GATHER_S, none, 2) and not late.lasts(10.1 + GATHER_S, none, 2)


def test_workers_are_asked_to_report_less_often_in_a_large_fleet() -> None:
    assert Harness(10).fleet.report_every_s == pytest.approx(0.1)
    assert Harness(1000).fleet.report_every_s == pytest.approx(1.0)


# ---- streams -------------------------------------------------------------------------------------------------------


def test_a_hello_that_was_overtaken_does_not_replace_the_stream_that_stands() -> None:
    attached = Attached()
    first, second = Stream("n", "a", 1), Stream("n", "a", 2)
    assert attached.join(second) and not attached.join(first)
    assert not attached.leave(first) and attached.counts(second), "and its end takes nothing away"
    assert attached.join(Stream("n", "b", 1)), "a new process counts from one again"
    assert not attached.leave(second)


# ---- sessions, and clocks that differ --------------------------------------------------------------------------------


def test_an_erased_session_is_unknown_once_its_holders_have_said_so_whoever_was_asked() -> None:
    asked, other = Harness(), Harness()
    for h in (asked, other):
        h.hold("node-0", 64)
        h.hold("node-1", 64)
    assert asked.directory.erase(S) and asked.directory.get(S) is None
    asked.hold("node-0", 64)  # this was under way
    for h in (asked, other):
        for node in ("node-0", "node-1"):
            h.held(node, [(S, "", 0, 0.0, Held(0, 0))])
        assert h.directory.get(S) is None
        h.validate()


def test_a_session_that_was_used_again_after_its_erasure_stays_known() -> None:
    h = Harness()
    h.hold("node-0", 64)
    h.hold("node-1", 64)
    h.directory.erase(S)
    # Used again on node-0, whose clock is an hour behind the other's; then node-1 gets round to erasing what it had.
    h.held("node-0", [(S, "m", 128, 1.0 - HOUR_S, here(128))])
    h.held("node-1", [(S, "", 0, 0.0, Held(0, 0))])
    session = h.directory.get(S)
    assert session is not None and session.tokens == 128 and list(session.holders) == ["node-0"]


def test_an_erased_session_that_nobody_held_any_more_is_forgotten_too() -> None:
    h = Harness()
    h.hold("node-0", 64)
    h.held("node-0", [(S, "m", 960, 1.0, Held(0, 0))])
    assert h.directory.get(S) is not None, "the blob tier still has it"
    h.held("node-1", [(S, "", 0, 0.0, Held(0, 0))])
    assert h.directory.get(S) is None


def test_the_newest_manifest_is_the_last_that_was_used_whatever_the_clocks_say() -> None:
    h = Harness()
    h.held("node-0", [(S, "m", 640, HOUR_S, here(640))])  # its clock is an hour ahead
    h.held("node-1", [(S, "m", 960, 5.0, here(960))])  # the next turn was there
    session = h.directory.get(S)
    assert session is not None and session.tokens == 960
    h.held("node-0", [(S, "m", 640, HOUR_S, here(320))])  # it drops some of what it had: that is no use of the session
    assert session.tokens == 960
    h.held("node-1", [(S, "m", 1024, 6.0, here(1024))])
    assert session.tokens == 1024


def test_a_word_that_comes_twice_or_late_changes_nothing() -> None:
    h = Harness()
    h.held("node-0", [(S, "m", 64, 1.0, here(64))], full=True, number=1)
    h.held("node-0", [(S, "m", 128, 2.0, here(128))], number=3)
    for late, tokens in ((3, 64), (2, 0), (1, 64)):
        h.held("node-0", [(S, "m", 64, 9.0, here(tokens))], full=late == 1, number=late)
    session = h.directory.get(S)
    assert session is not None and session.tokens == 128 and session.holders["node-0"].tokens == 128
    h.store_joined("node-0", "s0")
    h.held("node-0", [(S, "m", 64, 1.0, here(64))], full=True, number=1)
    assert h.directory.count("node-0") == 1, "a new stream counts from one again"
