"""One workflow's call graph: what was declared, what was observed, and what follows an agent's request according to both.

Observations fade: what a request was followed by counts `_FADES` times as much once another request of the same agent has ended. A
declared graph counts like so many observations (`_DECLARED_REQUESTS`), or alone if it is not to learn. SYMPHONY, section 3.5.
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
    """Why a session is named for a next hop: it preceded or followed this session before, or is among the agent's latest of the run."""

    LINKED = "linked"
    RECENT = "recent"


@dataclass(slots=True)
class Followed:
    """What was observed of one edge. All are sums that fade together.

    came: requests of the source that the target followed; calls: of the target, at most MAX_CALLS a request; delay_s: of the first of them,
    from the start of the source's request; gap_s: the same from its end. tried, right: sessions that were named, and that came.
    """

    came: float = 0.0
    calls: float = 0.0
    delay_s: float = 0.0
    gap_s: float = 0.0
    tried: dict[Known, float] = field(default_factory=dict)
    right: dict[Known, float] = field(default_factory=dict)

    def fade(self) -> None:
        """One more request of the source has ended."""
        self.came, self.calls = self.came * _FADES, self.calls * _FADES
        self.delay_s, self.gap_s = self.delay_s * _FADES, self.gap_s * _FADES
        for counts in (self.tried, self.right):
            for known in counts:
                counts[known] *= _FADES

    def chance(self, known: Known) -> float:
        """The chance that a session which is named for this reason is the one that comes, when one comes."""
        return (self.right.get(known, 0.0) + 1.0) / (self.tried.get(known, 0.0) + 1.0)


@dataclass(slots=True)
class Agent:
    """What was observed of one agent. requests: ended ones, faded; seen: all of them."""

    requests: float = 0.0
    seen: int = 0
    followed: dict[str, Followed] = field(default_factory=dict)


class CallGraph:
    """See the module. `declared`: by a caller, or None. `agents`: what was observed. Mutated by `ended`, `followed` and `named`."""

    def __init__(self, declared: Graph | None = None) -> None:
        self.declared = declared
        self.agents: dict[str, Agent] = {}

    # ---- what was observed -------------------------------------------------------------------------------------
    def ended(self, agent: str) -> None:
        """A request of this agent has ended. Call before `followed` says by what it was followed."""
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
        """An ended request of `source` was followed by its call number `call` (from 1) of `target`."""
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
        """A session was named for this hop, and the call that came was of that session, or of another."""
        edge = self.agents[source].followed.get(target) if source in self.agents else None
        if edge is not None:
            edge.tried[known] = edge.tried.get(known, 0.0) + 1.0
            edge.right[known] = edge.right.get(known, 0.0) + float(right)

    def admits(self, agent: str) -> bool:
        """This agent is known, or there is room for one more."""
        return self._agent(agent) is not None

    def _agent(self, name: str) -> Agent | None:
        if name not in self.agents and len(self.agents) < MAX_AGENTS:
            self.agents[name] = Agent()
        return self.agents.get(name)

    def _edges(self) -> int:
        return sum(len(agent.followed) for agent in self.agents.values())

    # ---- what follows ------------------------------------------------------------------------------------------
    def next(self, agent: str) -> list[Edge]:
        """What follows a request of this agent, likeliest first."""
        targets: dict[str, None] = dict.fromkeys(e.target for e in self.declared.edges if e.source == agent) if self.declared else {}
        if (self.declared is None or self.declared.learn) and agent in self.agents:
            targets |= dict.fromkeys(self.agents[agent].followed)
        edges = (self.edge(agent, target) for target in targets)
        return sorted((e for e in edges if e is not None), key=lambda e: (-e.probability, e.target))

    def edge(self, source: str, target: str) -> Edge | None:
        """What is known of one edge: the declaration and the observations together."""
        said = next((e for e in self.declared.edges if (e.source, e.target) == (source, target)), None) if self.declared else None
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
        """The edges as they were observed, without what was declared."""
        for source, agent in self.agents.items():
            for target, f in agent.followed.items():
                yield _edge(source, target, f.came / max(agent.requests, _EPSILON), f.calls / f.came, f.delay_s / f.came), f

    def gap_s(self, source: str, target: str) -> float:
        """How long after the end of a request of `source` one of `target` usually comes; 0 when it was never observed."""
        followed = self.agents[source].followed.get(target) if source in self.agents else None
        return followed.gap_s / followed.came if followed is not None else 0.0

    def chance(self, source: str, target: str, known: Known) -> float:
        """`Followed.chance` of this edge; 1 when it was never observed."""
        followed = self.agents[source].followed.get(target) if source in self.agents else None
        return followed.chance(known) if followed is not None else 1.0

    def validate(self) -> None:
        """Raise AssertionError when a count is impossible."""
        assert len(self.agents) <= MAX_AGENTS and self._edges() <= MAX_EDGES
        for name, agent in self.agents.items():
            assert agent.requests <= agent.seen + _EPSILON
            for target, f in agent.followed.items():
                assert target in self.agents, f"{name}: {target} is not known"
                assert _FORGOTTEN <= f.came <= agent.seen + _EPSILON, f"{name} to {target}: followed more often than it asked"
                assert f.came - _EPSILON <= f.calls and f.delay_s >= 0.0 and f.gap_s >= 0.0
                assert all(f.right[known] <= f.tried[known] + _EPSILON for known in f.right)


def _edge(source: str, target: str, probability: float, calls: float, delay_s: float) -> Edge:
    return Edge(source, target, min(probability, 1.0), min(max(calls, 1.0), MAX_CALLS), min(delay_s, MAX_DELAY_S))
