"""One workflow's call graph: the declaration, the observations, and what follows an agent's request by both.

Observations fade: each ended request of an agent multiplies the counts of its successors by `_FADES`. A declared graph
counts like `_DECLARED_REQUESTS` observations, or alone if it is not to learn. SYMPHONY, section 3.5.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from contracts.workflow import MAX_AGENTS, MAX_CALLS, MAX_DELAY_S, MAX_EDGES, Edge, Graph

_FADES = 0.98
_DECLARED_REQUESTS = 8.0
#: Edges that have faded below this weight are forgotten.
_FORGOTTEN = 0.01
_EPSILON = 1e-6


class Known(Enum):
    """Why a session is named for a next hop: it preceded or followed this session before, or is one of the agent's
    latest in the run."""

    LINKED = "linked"
    RECENT = "recent"


@dataclass(slots=True)
class Followed:
    """The observations of one edge, as sums that fade together.

    came: requests of the source that the target followed. calls: of the target, at most MAX_CALLS per request. delay_s:
    from the start of the source's request to the first call; gap_s: from its end. tried, right: named sessions, and
    those of them that came.
    """

    came: float = 0.0
    calls: float = 0.0
    delay_s: float = 0.0
    gap_s: float = 0.0
    tried: dict[Known, float] = field(default_factory=dict)
    right: dict[Known, float] = field(default_factory=dict)

    def fade(self) -> None:
        """A request of the source has ended."""
        self.came, self.calls = self.came * _FADES, self.calls * _FADES
        self.delay_s, self.gap_s = self.delay_s * _FADES, self.gap_s * _FADES
        for counts in (self.tried, self.right):
            for known in counts:
                counts[known] *= _FADES

    def chance(self, known: Known) -> float:
        """The probability that a session named for this reason is the one that comes, if one comes."""
        return (self.right.get(known, 0.0) + 1.0) / (self.tried.get(known, 0.0) + 1.0)


@dataclass(slots=True)
class Agent:
    """The observations of one agent. requests: ended ones, faded. seen: ended ones, counted in full."""

    requests: float = 0.0
    seen: int = 0
    followed: dict[str, Followed] = field(default_factory=dict)


class CallGraph:
    """See the module. agents: the observations, mutated by `ended`, `followed` and `named`."""

    def __init__(self, declared: Graph | None = None) -> None:
        self.declare(declared)
        self.agents: dict[str, Agent] = {}

    @property
    def declared(self) -> Graph | None:
        """The declaration."""
        return self._declared

    def declare(self, graph: Graph | None) -> None:
        """Replace the declaration; the observations stay."""
        self._declared = graph
        #: The declared edges by source and target.
        self._said: dict[str, dict[str, Edge]] = {}
        for edge in graph.edges if graph is not None else ():
            self._said.setdefault(edge.source, {})[edge.target] = edge

    # ---- what was observed -------------------------------------------------------------------------------------
    def ended(self, agent: str) -> None:
        """A request of this agent has ended. Call it before `followed` for this request."""
        record = self._agent(agent)
        if record is None:
            return
        record.requests = record.requests * _FADES + 1.0
        record.seen += 1
        for target, followed in list(record.followed.items()):
            followed.fade()
            if followed.came < _FORGOTTEN:
                del record.followed[target]

    def followed(self, source: str, target: str, call: int, delay_s: float, gap_s: float) -> None:
        """An ended request of `source` was followed by a call of `target`, its `call`-th (from 1)."""
        record = self._agent(source)
        if record is None or self._agent(target) is None or call > MAX_CALLS:
            return
        edge = record.followed.get(target)
        if edge is None:
            if call > 1 or self._edges() >= MAX_EDGES:
                return
            edge = record.followed[target] = Followed()
        if call == 1:
            edge.came += 1.0
            edge.delay_s += max(delay_s, 0.0)
            edge.gap_s += max(gap_s, 0.0)
        edge.calls += 1.0

    def named(self, source: str, target: str, known: Known, right: bool) -> None:
        """A session was named for this hop, and a call came. right: it was of that session."""
        edge = self.agents[source].followed.get(target) if source in self.agents else None
        if edge is not None:
            edge.tried[known] = edge.tried.get(known, 0.0) + 1.0
            edge.right[known] = edge.right.get(known, 0.0) + float(right)

    def admits(self, agent: str) -> bool:
        """Whether this agent is known or can be added. Mutates: adds it."""
        return self._agent(agent) is not None

    def _agent(self, name: str) -> Agent | None:
        if name not in self.agents and len(self.agents) < MAX_AGENTS:
            self.agents[name] = Agent()
        return self.agents.get(name)

    def _edges(self) -> int:
        return sum(len(agent.followed) for agent in self.agents.values())

    # ---- what follows ------------------------------------------------------------------------------------------
    def next(self, agent: str) -> list[Edge]:
        """The edges from this agent, most probable first."""
        targets: dict[str, None] = dict.fromkeys(self._said.get(agent, ()))
        if (self.declared is None or self.declared.learn) and agent in self.agents:
            targets |= dict.fromkeys(self.agents[agent].followed)
        edges = (self.edge(agent, target) for target in targets)
        return sorted((e for e in edges if e is not None), key=lambda e: (-e.probability, e.target))

    def edge(self, source: str, target: str) -> Edge | None:
        """One edge from declaration and observations together; None: unknown."""
        said = self._said.get(source, {}).get(target)
        if self.declared is not None and not self.declared.learn:
            return said
        seen = self.agents.get(source)
        followed = seen.followed.get(target) if seen else None
        if followed is None and said is None:
            return None
        weight = _DECLARED_REQUESTS if self.declared is not None and source in self.declared.agents else 0.0
        followed, requests = followed or Followed(), seen.requests if seen else 0.0
        before = weight * said.probability if said is not None else 0.0
        came = before + followed.came
        calls, delay_s = (said.calls, said.delay_s) if said is not None else (1.0, 0.0)
        if came > 0.0:
            calls = (before * calls + followed.calls) / came
            delay_s = (before * delay_s + followed.delay_s) / came
        return _edge(source, target, came / max(weight + requests, _EPSILON), calls, delay_s)

    def observed(self) -> Iterator[tuple[Edge, Followed]]:
        """The edges by observation only."""
        for source, agent in self.agents.items():
            for target, f in agent.followed.items():
                yield (
                    _edge(source, target, f.came / max(agent.requests, _EPSILON), f.calls / f.came, f.delay_s / f.came),
                    f,
                )

    def gap_s(self, source: str, target: str) -> float:
        """Mean seconds from the end of a request of `source` to one of `target`; 0 if never observed."""
        followed = self.agents[source].followed.get(target) if source in self.agents else None
        return followed.gap_s / followed.came if followed is not None else 0.0

    def chance(self, source: str, target: str, known: Known) -> float:
        """`Followed.chance` of this edge; 1 if never observed."""
        followed = self.agents[source].followed.get(target) if source in self.agents else None
        return followed.chance(known) if followed is not None else 1.0

    def validate(self) -> None:
        """Raise AssertionError when a count is impossible."""
        assert len(self.agents) <= MAX_AGENTS and self._edges() <= MAX_EDGES
        for name, agent in self.agents.items():
            assert agent.requests <= agent.seen + _EPSILON
            for target, f in agent.followed.items():
                assert target in self.agents, f"{name}: {target} is not known"
                assert _FORGOTTEN <= f.came <= agent.seen + _EPSILON, (
                    f"{name} to {target}: followed more often than it asked"
                )
                assert f.came - _EPSILON <= f.calls and f.delay_s >= 0.0 and f.gap_s >= 0.0
                assert all(f.right[known] <= f.tried[known] + _EPSILON for known in f.right)


def _edge(source: str, target: str, probability: float, calls: float, delay_s: float) -> Edge:
    return Edge(source, target, min(probability, 1.0), min(max(calls, 1.0), MAX_CALLS), min(delay_s, MAX_DELAY_S))
