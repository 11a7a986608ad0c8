"""The workflows of all tenants with their runs: what a request of an agent says about the next ones.

A workflow begins when it is declared or when a request first names it. Memory is bounded: of a tenant's workflows that nobody declared the
longest unused one goes first, and runs are forgotten when nothing came for a while.
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
MAX_RUNS = 5_000
IDLE_S = 900.0
_TIDY_S = 10.0
#: Hints that one request sends out at most.
MAX_HINTS = 16

WorkflowKey = tuple[str, str]
"""Tenant and name."""


@dataclass(frozen=True, slots=True)
class NextHop:
    """A session that is likely to ask soon. arrival_s: when. borrowed: the agent has none in this run yet; this one, of the latest other
    run, has the beginning of its prompt."""

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
        #: By run id, the longest idle first.
        self.runs: dict[str, Run] = {}
        #: Of each agent, the session of the latest run and of the latest other one: (run, session), the latest last.
        self.latest: dict[str, list[tuple[str, str]]] = {}

    def use(self, agent: str, run: str, session_id: str) -> None:
        """This agent has used this session in this run."""
        others = [pair for pair in self.latest.get(agent, ()) if pair[0] != run]
        self.latest[agent] = [*others[-1:], (run, session_id)]

    def borrowed(self, agent: str, run: str) -> str | None:
        """The session that this agent used in the most recent other run."""
        others = [session for other, session in self.latest.get(agent, ()) if other != run]
        return others[-1] if others else None


class Callgraphs:
    """See the module. `changed`: workflows whose graph is not as it was last stored; whoever stores them removes them from it."""

    def __init__(self) -> None:
        self._tenants: dict[str, dict[str, Workflow]] = {}
        #: (tenant, workflow, run) by the id of a request that has not ended, for the workers' reports.
        self._asking: dict[str, tuple[str, str, str]] = {}
        #: By tenant.
        self._runs: Counter[str] = Counter()
        self._tidied_s = 0.0
        self.changed: set[WorkflowKey] = set()

    # ---- graphs ------------------------------------------------------------------------------------------------
    def get(self, tenant: str, name: str) -> CallGraph | None:
        """The graph of this workflow."""
        workflow = self._tenants.get(tenant, {}).get(name)
        return workflow.graph if workflow is not None else None

    def of_tenant(self, tenant: str) -> dict[str, CallGraph]:
        """All of a tenant's workflows by name, in order of their names."""
        return {name: workflow.graph for name, workflow in sorted(self._tenants.get(tenant, {}).items())}

    def declare(self, tenant: str, name: str, graph: Graph) -> None:
        """Say what a workflow is; what was observed of it stays. Raises InvalidRequest when the tenant has declared too many."""
        workflow = self._workflow(tenant, name)
        if workflow is None:
            raise InvalidRequest(f"a tenant declares at most {MAX_WORKFLOWS} workflows; delete one first", param="name")
        workflow.graph.declared = graph
        self.changed.add((tenant, name))

    def restore(self, tenant: str, name: str, graph: CallGraph) -> None:
        """A graph as it was stored. Ignored when the tenant has too many."""
        workflow = self._workflow(tenant, name)
        if workflow is not None:
            workflow.graph = graph

    def forget(self, tenant: str, name: str) -> bool:
        """Drop a workflow with all that was observed. False: there was none."""
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
    def request(self, request_id: str, session: SessionKey, hop: Hop, now: float) -> tuple[list[NextHop], list[SessionKey]]:
        """A request of an agent is here: what is likely next, likeliest first; and the sessions that were borrowed for this agent in this
        run, which have served their turn."""
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
        likely = sorted((h for h in hops if h.chance >= MIN_CHANCE), key=lambda h: -h.chance)
        return likely[:MAX_HINTS], served

    def finished(self, request_ids: Iterable[str], now: float) -> None:
        """Workers have ended these requests; those that belong to no run are ignored."""
        if not self._asking:
            return
        for request_id in request_ids:
            key = self._asking.pop(request_id, None)
            if key is not None:
                run = self._tenants[key[0]][key[1]].runs.get(key[2])
                if run is not None:
                    run.end(request_id, now)

    def erase(self, session: SessionKey) -> None:
        """This session was erased: no hint names it any more. What was learned from it stays, as counts."""
        for workflow in self._tenants.get(session.tenant, {}).values():
            others = {agent: [pair for pair in pairs if pair[1] != session.session_id] for agent, pairs in workflow.latest.items()}
            workflow.latest = {agent: pairs for agent, pairs in others.items() if pairs}
            for run in workflow.runs.values():
                run.erase(session.session_id)
                self._drop(run)

    def _drop(self, run: Run) -> None:
        for gone in run.dropped:
            self._asking.pop(gone, None)
        run.dropped.clear()

    def tick(self, now: float) -> None:
        """Forget runs in which nothing came for IDLE_S."""
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
        """Of the tenant that has most."""
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
        assert len(self._tenants) <= MAX_TENANTS and all(0 < len(known) <= MAX_WORKFLOWS for known in self._tenants.values())
        assert self._runs == Counter(t for (t, _), w in everything.items() for _ in w.runs) and self._runs.total() <= MAX_RUNS
        for workflow in everything.values():
            workflow.graph.validate()
            for run in workflow.runs.values():
                run.validate()
                assert run._graph is workflow.graph
        for request_id, (tenant, name, run_id) in self._asking.items():
            run_of = everything[(tenant, name)].runs.get(run_id)
            assert run_of is not None and request_id in run_of.requests, f"{request_id} is of no run"
