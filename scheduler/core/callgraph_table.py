"""The workflows of all tenants with their runs: which requests are likely to follow one of an agent.

A workflow begins when it is declared or first named by a request. Memory is bounded: a tenant's undeclared workflows go
first, least recently used first, and idle runs are forgotten.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from contracts.errors import InvalidRequest
from contracts.ids import SessionKey
from contracts.workflow import Graph, Hop
from scheduler.core.callgraph import CallGraph
from scheduler.core.callgraph_runs import MIN_CHANCE, Run

MAX_WORKFLOWS = 256
MAX_TENANTS = 4096
#: Declared edges of all of a tenant's workflows together: they are listed in one answer.
MAX_TENANT_EDGES = 8192
MAX_RUNS = 5_000
IDLE_S = 900.0
_TIDY_S = 10.0
#: Hints from one request at most.
MAX_HINTS = 16

WorkflowKey = tuple[str, str]
"""Tenant and name."""


@dataclass(frozen=True, slots=True)
class NextHop:
    """A session that is likely to send a request soon, at `arrival_s`.

    borrowed: the agent has no session in this run; this one is of the latest other run and shares its prompt's start.
    """

    session: SessionKey
    agent: str
    chance: float
    arrival_s: float
    delay_s: float
    borrowed: bool = False


class Workflow:
    """One workflow of a tenant."""

    def __init__(self) -> None:
        self.graph = CallGraph()
        #: By run id, longest idle first.
        self.runs: dict[str, Run] = {}
        #: By agent, (run, session) of the latest run and of the one before it, latest last.
        self.latest: dict[str, list[tuple[str, str]]] = {}

    def use(self, agent: str, run: str, session_id: str) -> None:
        """Note that this agent uses this session in this run."""
        others = [pair for pair in self.latest.get(agent, ()) if pair[0] != run]
        self.latest[agent] = [*others[-1:], (run, session_id)]

    def borrowed(self, agent: str, run: str) -> str | None:
        """The session that this agent used in the latest other run."""
        others = [session for other, session in self.latest.get(agent, ()) if other != run]
        return others[-1] if others else None


class Callgraphs:
    """See the module. changed: workflows whose graph differs from its stored form; whoever stores them clears it."""

    def __init__(self) -> None:
        self._tenants: dict[str, dict[str, Workflow]] = {}
        #: Running request to its (tenant, workflow, run), to interpret the workers' reports.
        self._asking: dict[str, tuple[str, str, str]] = {}
        #: Number of runs by tenant.
        self._runs: Counter[str] = Counter()
        self._tidied_s = 0.0
        #: By tenant, sessions that the next `tick` forgets.
        self._erased: dict[str, set[str]] = {}
        self.changed: set[WorkflowKey] = set()

    # ---- graphs ------------------------------------------------------------------------------------------------
    def get(self, tenant: str, name: str) -> CallGraph | None:
        """The graph of this workflow."""
        workflow = self._tenants.get(tenant, {}).get(name)
        return workflow.graph if workflow is not None else None

    def of_tenant(self, tenant: str) -> dict[str, CallGraph]:
        """A tenant's graphs by workflow name, sorted."""
        return {name: workflow.graph for name, workflow in sorted(self._tenants.get(tenant, {}).items())}

    def declare(self, tenant: str, name: str, graph: Graph) -> None:
        """Set a workflow's declared graph; its observations stay. Raises InvalidRequest if the tenant has declared too
        much."""
        others = (w.graph.declared for n, w in self._tenants.get(tenant, {}).items() if n != name)
        if sum(len(g.edges) for g in (*others, graph) if g is not None) > MAX_TENANT_EDGES:
            raise InvalidRequest(
                f"a tenant declares at most {MAX_TENANT_EDGES} edges in all its workflows; delete one first",
                param="edges",
            )
        workflow = self._workflow(tenant, name)
        if workflow is None:
            raise InvalidRequest(f"a tenant declares at most {MAX_WORKFLOWS} workflows; delete one first", param="name")
        workflow.graph.declare(graph)
        self.changed.add((tenant, name))

    def restore(self, tenant: str, name: str, graph: CallGraph) -> None:
        """Take a stored graph. Ignored if the tenant has too many."""
        workflow = self._workflow(tenant, name)
        if workflow is not None:
            workflow.graph = graph

    def forget(self, tenant: str, name: str) -> bool:
        """Drop a workflow with its observations. False if there was none."""
        workflow = self._tenants.get(tenant, {}).pop(name, None)
        if workflow is None:
            return False
        self._count(tenant, -len(workflow.runs))
        self._asking = {request_id: key for request_id, key in self._asking.items() if key[:2] != (tenant, name)}
        if not self._tenants[tenant]:
            del self._tenants[tenant]
        self.changed.add((tenant, name))
        return True

    def _workflow(self, tenant: str, name: str) -> Workflow | None:
        known = self._tenants.get(tenant, {})
        if name not in known:
            if not known and len(self._tenants) >= MAX_TENANTS:
                return None
            if len(known) >= MAX_WORKFLOWS:
                free = next((other for other, workflow in known.items() if workflow.graph.declared is None), None)
                if free is None:
                    return None
                self.forget(tenant, free)
            known = self._tenants.setdefault(tenant, {})
            known[name] = Workflow()
        return known[name]

    # ---- runs --------------------------------------------------------------------------------------------------
    def request(
        self, request_id: str, session: SessionKey, hop: Hop, now: float
    ) -> tuple[list[NextHop], list[SessionKey]]:
        """A request of an agent has arrived. Returns the likely next hops, most likely first, and the sessions borrowed
        for this agent in this run, whose hints have come true."""
        tenant = session.tenant
        workflow = self._workflow(tenant, hop.workflow)
        if workflow is None or not workflow.graph.admits(hop.agent):
            return [], []
        known = self._tenants[tenant]
        known[hop.workflow] = known.pop(hop.workflow)
        run = workflow.runs.pop(hop.run, None)
        if run is None:
            while self._runs.total() >= MAX_RUNS:
                self._close_longest_idle(now)
            run = Run(workflow.graph)
            self._count(tenant, 1)
        workflow.runs[hop.run] = run
        for ended in hop.ended:
            self._asking.pop(ended, None)
        request = run.begin(request_id, hop, session.session_id, now)
        if request.ended_s is None:
            self._asking[request_id] = (tenant, hop.workflow, hop.run)
        self._drop(run)
        workflow.use(hop.agent, hop.run, session.session_id)
        self.changed.add((tenant, hop.workflow))
        hops: list[NextHop] = []
        for edge in workflow.graph.next(hop.agent):
            if edge.probability < MIN_CHANCE:
                break
            found = run.candidates(edge, session.session_id)
            request.named[edge.target] = dict(found)
            arrival = (now + edge.delay_s, edge.delay_s)
            for session_id, why in found:
                chance = edge.probability * workflow.graph.chance(edge.source, edge.target, why)
                hops.append(NextHop(SessionKey(tenant, session_id), edge.target, chance, *arrival))
            other = workflow.borrowed(edge.target, hop.run) if edge.target not in run.sessions else None
            if other is not None:
                other = run.borrowed.setdefault(edge.target, other)
                hops.append(NextHop(SessionKey(tenant, other), edge.target, edge.probability, *arrival, borrowed=True))
        borrowed = run.borrowed.pop(hop.agent, None)
        served = [SessionKey(tenant, borrowed)] if borrowed is not None else []
        erased = self._erased.get(tenant, ())
        likely = sorted(
            (h for h in hops if h.chance >= MIN_CHANCE and h.session.session_id not in erased), key=lambda h: -h.chance
        )
        return likely[:MAX_HINTS], served

    def finished(self, request_ids: Iterable[str], now: float) -> None:
        """Workers have ended these requests; those of no run are ignored."""
        if not self._asking:
            return
        for request_id in request_ids:
            key = self._asking.pop(request_id, None)
            if key is not None:
                run = self._tenants[key[0]][key[1]].runs.get(key[2])
                if run is not None:
                    run.end(request_id, now)

    def erase(self, session: SessionKey) -> None:
        """Forget an erased session: no hint names it from now on, and the next `tick` removes it. Counts learned from
        it stay. All runs of its tenant may know it: sessions that are erased together cost one look at each.
        """
        if session.tenant in self._tenants:
            self._erased.setdefault(session.tenant, set()).add(session.session_id)

    def _forget_erased(self) -> None:
        for tenant, gone in self._erased.items():
            for workflow in self._tenants.get(tenant, {}).values():
                others = {a: [pair for pair in pairs if pair[1] not in gone] for a, pairs in workflow.latest.items()}
                workflow.latest = {agent: pairs for agent, pairs in others.items() if pairs}
                for run in workflow.runs.values():
                    run.erase(gone)
                    self._drop(run)
        self._erased.clear()

    def _drop(self, run: Run) -> None:
        for gone in run.dropped:
            self._asking.pop(gone, None)
        run.dropped.clear()

    def tick(self, now: float) -> None:
        """Forget erased sessions, and runs without a request for IDLE_S."""
        self._forget_erased()
        if now < self._tidied_s + _TIDY_S:
            return
        self._tidied_s = now
        for tenant, workflows in self._tenants.items():
            for workflow in workflows.values():
                while workflow.runs:
                    name, run = next(iter(workflow.runs.items()))
                    if run.last_s + IDLE_S > now:
                        break
                    self._close(tenant, workflow, name, now)

    def _close_longest_idle(self, now: float) -> None:
        """Close the longest idle run of the tenant with most runs."""
        tenant = self._runs.most_common(1)[0][0]
        running = [w for w in self._tenants[tenant].values() if w.runs]
        workflow = min(running, key=lambda w: next(iter(w.runs.values())).last_s)
        self._close(tenant, workflow, next(iter(workflow.runs)), now)

    def _close(self, tenant: str, workflow: Workflow, name: str, now: float) -> None:
        run = workflow.runs.pop(name)
        run.close(now)
        self._count(tenant, -1)
        for request_id in run.requests:
            self._asking.pop(request_id, None)

    def _count(self, tenant: str, runs: int) -> None:
        self._runs[tenant] += runs
        if not self._runs[tenant]:
            del self._runs[tenant]

    def validate(self) -> None:
        """Raise AssertionError when the tables disagree."""
        everything = {(t, name): w for t, known in self._tenants.items() for name, w in known.items()}
        assert len(self._tenants) <= MAX_TENANTS and all(
            0 < len(known) <= MAX_WORKFLOWS for known in self._tenants.values()
        )
        assert (
            self._runs == Counter(t for (t, _), w in everything.items() for _ in w.runs)
            and self._runs.total() <= MAX_RUNS
        )
        for workflow in everything.values():
            workflow.graph.validate()
            for run in workflow.runs.values():
                run.validate()
                assert run._graph is workflow.graph
        for request_id, (tenant, name, run_id) in self._asking.items():
            run_of = everything[(tenant, name)].runs.get(run_id)
            assert run_of is not None and request_id in run_of.requests, f"{request_id} is of no run"
