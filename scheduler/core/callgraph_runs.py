"""One run of a workflow: its requests, which of them followed which, and the sessions of its agents.

A request follows one that has ended: the one that usually has this successor and ended about as long ago as usual, else
the one that ended last. All branches of a fan-out thus follow the request that opened them. Sessions that followed each
other are linked. So if an agent has many sessions (an engineer with one per file), a review names the right one.
"""

from __future__ import annotations

import math
from collections.abc import Set
from dataclasses import dataclass, field

from contracts.workflow import Edge, Hop
from scheduler.core.callgraph import CallGraph, Known

#: Requests kept of a run, and sessions kept of each agent in it.
MAX_REQUESTS = 32
MAX_SESSIONS = 32
#: A successor may deviate from its usual gap by this many seconds plus this many times the gap.
_LATE_S, _LATE_TIMES = 5.0, 2.0
#: Edges below this probability are ignored.
MIN_CHANCE = 0.1


@dataclass(slots=True)
class Request:
    """One request of an agent. called: calls of each agent that followed it. named: by agent, the sessions named as
    successors, and why."""

    request_id: str
    agent: str
    session_id: str
    started_s: float
    ended_s: float | None = None
    called: dict[str, int] = field(default_factory=dict)
    named: dict[str, dict[str, Known]] = field(default_factory=dict)


class Run:
    """See the module. Methods mutate the run and the workflow's `graph`."""

    def __init__(self, graph: CallGraph) -> None:
        self._graph = graph
        self.last_s = 0.0
        #: By request id, in the order of their start.
        self.requests: dict[str, Request] = {}
        #: By agent, least recently used first.
        self.sessions: dict[str, dict[str, None]] = {}
        #: (session, agent) to that agent's session that last preceded or followed it.
        self._linked: dict[tuple[str, str], str] = {}
        #: By agent without a session in this run: the session of another run that was named for it.
        self.borrowed: dict[str, str] = {}
        #: Requests dropped since the owner last cleared this list.
        self.dropped: list[str] = []

    def begin(self, request_id: str, hop: Hop, session_id: str, now: float) -> Request:
        """A request has arrived; learn what it followed. A known one is returned unchanged."""
        self.last_s = now
        if request_id in self.requests:
            return self.requests[request_id]
        for ended in hop.ended:
            self.end(ended, now)
        for other in [r for r in self.requests.values() if r.session_id == session_id]:
            self.end(other.request_id, now)
        cause = self._cause(hop.agent, now)
        if cause is not None:
            self._followed(cause, hop.agent, session_id, now)
        request = self.requests[request_id] = Request(request_id, hop.agent, session_id, now)
        self._use(hop.agent, session_id)
        while len(self.requests) > MAX_REQUESTS:
            oldest = next(iter(self.requests))
            self.end(oldest, now)
            del self.requests[oldest]
            self.dropped.append(oldest)
        return request

    def end(self, request_id: str, now: float) -> None:
        """A request has ended. No effect if it is unknown or had ended."""
        request = self.requests.get(request_id)
        if request is not None and request.ended_s is None:
            request.ended_s = now
            self._graph.ended(request.agent)

    def close(self, now: float) -> None:
        """The run is over: end all its requests."""
        for request_id in self.requests:
            self.end(request_id, now)

    def erase(self, gone: Set[str]) -> None:
        """Forget these sessions and their requests."""
        for request in [r for r in self.requests.values() if r.session_id in gone]:
            self.end(request.request_id, self.last_s)
            del self.requests[request.request_id]
            self.dropped.append(request.request_id)
        for request in self.requests.values():
            for named in request.named.values():
                for session in gone & named.keys():
                    del named[session]
        self.sessions = {
            agent: kept for agent, known in self.sessions.items() if (kept := {s: None for s in known if s not in gone})
        }
        self.borrowed = {agent: other for agent, other in self.borrowed.items() if other not in gone}
        self._unlink(gone)

    # ---- what followed what ------------------------------------------------------------------------------------
    def _cause(self, agent: str, now: float) -> Request | None:
        """The request that a request of `agent` arriving now follows; None: none has ended."""
        last: Request | None = None
        best: tuple[float, Request] | None = None
        edges = {source: self._graph.edge(source, agent) for source in {r.agent for r in self.requests.values()}}
        for request in self.requests.values():
            if request.ended_s is None:
                continue
            if last is None or last.ended_s is None or request.ended_s >= last.ended_s:
                last = request
            edge = edges[request.agent]
            if (
                edge is None
                or edge.probability < MIN_CHANCE
                or request.called.get(agent, 0) >= math.ceil(edge.calls - 0.01)
            ):
                continue
            usual_s = self._graph.gap_s(request.agent, agent)
            off_s = abs(now - request.ended_s - usual_s)
            if off_s <= _LATE_S + _LATE_TIMES * usual_s and (best is None or off_s <= best[0]):
                best = (off_s, request)
        return best[1] if best is not None else last

    def _followed(self, cause: Request, agent: str, session_id: str, now: float) -> None:
        assert cause.ended_s is not None
        call = cause.called[agent] = cause.called.get(agent, 0) + 1
        self._graph.followed(cause.agent, agent, call, now - cause.started_s, now - cause.ended_s)
        named = cause.named.get(agent, {})
        if session_id in named:
            self._graph.named(cause.agent, agent, named.pop(session_id), right=True)
        elif named:
            self._graph.named(cause.agent, agent, named.pop(next(iter(named))), right=False)
        self._linked[(cause.session_id, agent)] = session_id
        self._linked[(session_id, cause.agent)] = cause.session_id

    def _use(self, agent: str, session_id: str) -> None:
        sessions = self.sessions.setdefault(agent, {})
        sessions.pop(session_id, None)
        sessions[session_id] = None
        if len(sessions) > MAX_SESSIONS:
            gone = next(iter(sessions))
            del sessions[gone]
            self._unlink({gone})

    def _unlink(self, gone: Set[str]) -> None:
        self._linked = {key: other for key, other in self._linked.items() if key[0] not in gone and other not in gone}

    # ---- which session is next ---------------------------------------------------------------------------------
    def candidates(self, edge: Edge, session_id: str) -> list[tuple[str, Known]]:
        """The likely sessions of `edge.target` after a request of this session, at most as many as expected calls."""
        wanted, found = round(edge.calls), dict[str, Known]()
        linked = self._linked.get((session_id, edge.target))
        busy = {r.session_id for r in self.requests.values() if r.ended_s is None and r.session_id != session_id}
        if linked is not None and linked not in busy:
            found[linked] = Known.LINKED
        for recent in reversed(self.sessions.get(edge.target, {})):
            if len(found) >= wanted:
                break
            if recent not in busy:
                found.setdefault(recent, Known.RECENT)
        return list(found.items())

    def validate(self) -> None:
        """Raise AssertionError when the tables disagree."""
        assert len(self.requests) <= MAX_REQUESTS and all(0 < len(s) <= MAX_SESSIONS for s in self.sessions.values())
        assert all(r.ended_s is None or r.started_s <= r.ended_s for r in self.requests.values())
        known = {session for sessions in self.sessions.values() for session in sessions}
        assert all(session in known and other in known for (session, _), other in self._linked.items())
