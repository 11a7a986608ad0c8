"""Random lives of nodes, their devices, requests and hints; the core's tables agree after every step."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from contracts.devices import node_of
from contracts.errors import RequestError
from contracts.ids import SessionKey
from contracts.workflow import Hop
from scheduler.core.attached import Attached, Stream
from scheduler.core.control import Ask, Control, Prefetch, Settings, Withdraw
from scheduler.core.directory import Held, Report
from scheduler.core.fleet import LoadReport
from scheduler.core.policies import POLICIES
from tests.scheduler.test_core import MODEL, TOKEN_BYTES, hint

NODES = ["node-0", "node-1", "node-2"]
DEVICES = ["node-0", "node-1/0", "node-1/1", "node-2/0", "node-2/1"]


class SchedulerMachine(RuleBasedStateMachine):
    """See the module."""

    nodes, devices = st.sampled_from(NODES), st.sampled_from(DEVICES)
    sessions = st.sampled_from([SessionKey("t", x) for x in "abcd"] + [SessionKey("u", "a")])
    requests = st.sampled_from([f"r{i}" for i in range(6)])

    def __init__(self) -> None:
        super().__init__()
        self.core, self.now, self.hints = Control(Settings(hints_per_s=0.2, hint_burst=3)), 0.0, 0
        self.attached, self.streams = Attached(), list[Stream]()
        for name in DEVICES:  # those of node-1 lie together, those of node-2 do not
            if name != "node-2/1":
                self.core.fleet.worker_joined(name, name, (MODEL,), 0.0)
        for name in NODES:
            self.core.fleet.store_joined(name, name)
        self.core.fleet.worker_joined("node-3", "node-3", (MODEL,), 0.0)
        self.core.fleet.worker_joined("node-2/1", "node-2/1", (MODEL,), 0.0)

    @rule(dt=st.floats(0, 20))
    def tick(self, dt: float) -> None:
        self.now += dt
        for command in self.core.tick(self.now):
            assert isinstance(command, Withdraw) or command.node in self.core.fleet.devices
            pending = self.core.advisories.get(
                command.session if isinstance(command, Withdraw) else command.hint.session
            )
            assert pending is not None and (command.node == pending.node) == isinstance(command, Prefetch)

    @rule(
        session=sessions,
        request=requests,
        priority=st.integers(-20, 20),
        policy=st.sampled_from(sorted(POLICIES)),
        avoid=st.sets(devices),
    )
    def place(self, session: SessionKey, request: str, priority: int, policy: str, avoid: set[str]) -> None:
        self.core.settings = Settings(POLICIES[policy])
        serving = {n.name for n in self.core.fleet.devices.values() if n.serving}
        try:
            placed = self.core.place(Ask(request, session, "m", priority, avoid=frozenset(avoid)), self.now)
        except RequestError:
            assert not serving
        else:
            assert placed.node in serving and request in self.core.fleet.devices[placed.node].outstanding
            assert placed.node not in avoid or not serving - avoid
            assert node_of(placed.node) not in placed.sources
            latest = self.core.explained.of(session)[0]
            assert (latest.what, latest.node, latest.request_id) == ("turn", placed.node, request)

    @rule(
        session=sessions,
        agent=st.sampled_from("xyz"),
        run=st.sampled_from(["r", "s"]),
        ended=st.lists(st.integers(0, 30), max_size=3),
        priority=st.integers(-3, 3),
    )
    def hop(self, session: SessionKey, agent: str, run: str, ended: list[int], priority: int) -> None:
        """A request of an agent: its next hops are hinted, and nobody's own hint is replaced."""
        self.hints += 1
        hop = Hop("w", agent, run, tuple(f"h{i}" for i in ended))
        own = {p.session for node in DEVICES for p in self.core.advisories.of_node(node) if not p.hint.caller} - {
            session
        }
        try:
            placed = self.core.place(Ask(f"h{self.hints}", session, "m", priority, hop=hop), self.now)
        except RequestError:
            return
        for command in placed.commands:
            if isinstance(command, Prefetch):
                assert command.hint.caller == f"{session.tenant}/w" and command.hint.session.tenant == session.tenant
                assert command.hint.session not in own and 0.1 <= command.hint.chance <= 1.0
        assert all(self.core.advisories.get(one) is not None for one in own)

    @rule(node=nodes, ended=st.lists(st.integers(0, 30), max_size=5))
    def hops_end(self, node: str, ended: list[int]) -> None:
        self.core.callgraphs.finished([f"h{i}" for i in ended], self.now)

    @rule(
        session=sessions,
        priority=st.integers(-3, 3),
        arrival=st.none() | st.floats(0, 30),
        ttl=st.floats(0, 30),
        address=st.sampled_from(["", "a", "b"]),
    )
    def advise(self, session: SessionKey, priority: int, arrival: float | None, ttl: float, address: str) -> None:
        self.hints += 1
        arrival_s = None if arrival is None else self.now + arrival
        expires_s = (arrival_s or self.now) + ttl
        name = f"a{self.hints}"
        before = self.core.advisories.get(session)
        given = hint(session, name, priority=priority, arrival_s=arrival_s, expires_s=expires_s, address=address)
        commands = self.core.advise(given, self.now)
        for command in commands:
            pending = self.core.advisories.get(session)
            assert pending is not None and pending.hint.advisory_id == name
            assert (command.node == pending.node) == isinstance(command, Prefetch)
            assert isinstance(command, Prefetch) or (before is not None and before.sent is not None)
        pending = self.core.advisories.get(session)
        if pending is not None and pending.sent is not None and self.core.fleet.serves(pending.node, "m", self.now):
            assert not self.core.advise(given, self.now), "nothing is new"

    @rule(session=sessions)
    def withdraw(self, session: SessionKey) -> None:
        known = self.core.advisories.get(session)
        commands = self.core.withdraw(session, session.tenant, "")
        assert (commands is None) == (known is None)

    @rule(
        node=devices,
        here=st.sets(requests),
        done=st.lists(requests),
        seconds=st.floats(0, 50),
        number=st.integers(0, 5),
    )
    def report(self, node: str, here: set[str], done: list[str], seconds: float, number: int) -> None:
        """Reports come twice, late and in any order; and two nodes may claim one request."""
        load = LoadReport(
            outstanding_s=seconds,
            by_priority={-1: seconds / 2, 5: seconds / 2},
            hbm_pages_total=100,
            hbm_pages_free=number,
        )
        self.core.fleet.loaded(node, load, sorted(here), done, self.now, number)

    @rule(node=devices, leaves=st.booleans(), drains=st.booleans())
    def worker(self, node: str, leaves: bool, drains: bool) -> None:
        if leaves:
            self.core.worker_left(node, self.now)
        else:
            self.core.fleet.worker_joined(node, "w", (MODEL,), self.now)
            if drains:
                self.core.fleet.drain(node)

    @rule(node=nodes, leaves=st.booleans())
    def store(self, node: str, leaves: bool) -> None:
        if leaves:
            self.core.store_left(node)
        else:
            self.core.store_joined(node, node)

    @rule(
        node=nodes,
        told=st.lists(st.tuples(sessions, st.integers(0, 3), st.integers(0, 3), st.floats(-3600, 3600)), max_size=3),
        full=st.booleans(),
        number=st.integers(0, 5),
        knows=st.booleans(),
    )
    def held(
        self, node: str, told: list[tuple[SessionKey, int, int, float]], full: bool, number: int, knows: bool
    ) -> None:
        """Reports of stores, too, come twice, late and in any order; each node's clock may be off by an hour."""
        before = self.core.fleet.nodes[node].held_number
        sizes = {s.key: (s.model, s.tokens, dict(s.holders)) for s in self.core.directory}
        reports: list[Report] = []
        for session, tokens, dram, ahead in told:
            held = Held(64 * tokens, 64 * tokens * TOKEN_BYTES, 64 * min(dram, tokens))
            reports.append((session, "m", 192 if knows or tokens else 0, self.now + ahead, held))
        self.core.held(node, reports, full=full, number=number)
        if number and number <= before:
            assert {s.key: (s.model, s.tokens, dict(s.holders)) for s in self.core.directory} == sizes
            return
        for session, *_, held in {r[0]: r for r in reports}.values():
            known = self.core.directory.get(session)
            assert (known is not None and node in known.holders) == (held.tokens > 0)
        if full:
            assert self.core.directory.count(node) == sum(r[-1].tokens > 0 for r in {r[0]: r for r in reports}.values())

    @rule(session=sessions)
    def erase(self, session: SessionKey) -> None:
        self.core.directory.erase(session)
        self.core.callgraphs.erase(session)

    @rule(node=nodes, instance=st.sampled_from("ab"), connection=st.integers(0, 3), leaves=st.integers(0, 5))
    def stream(self, node: str, instance: str, connection: int, leaves: int) -> None:
        """Of one process, the stream with the highest number counts; at most one of a node does."""
        stream = Stream(node, instance, connection)
        late = any(
            s.name == node and s.instance == instance and s.connection > connection and self.attached.counts(s)
            for s in self.streams
        )
        assert self.attached.join(stream) == (not late)
        self.streams.append(stream)
        assert sum(self.attached.counts(s) for s in self.streams if s.name == node) == 1
        if leaves < len(self.streams):
            ended = self.streams.pop(leaves)
            counted = self.attached.counts(ended)
            assert self.attached.leave(ended) == counted and not self.attached.counts(ended)

    @invariant()
    def holds(self) -> None:
        self.core.validate()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
