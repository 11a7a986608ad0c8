"""How tenants share the device within a priority: by weight, and so that none waits for another one's flood to end.

- **Turns** (`Service`): of the tenants that want to compute or to be admitted, the one goes next that was served least for its weight
  (virtual token counters: Sheng et al., "Fairness in Serving Large Language Models", OSDI '24; here seconds of the device). One that
  comes back is lifted to `CREDIT_S` below the least of those that wait: it has no more credit than that for the time in which it asked
  for little, enough for a turn of a conversation, and nobody who was served while no other waited has a debt for it.
- **Places** (`Shares`): while several tenants are here, each has its part of the places and pages by weight. What a tenant holds beyond
  its part gives way to a tenant that has less than half of its own. A tenant's oldest sequence is never beyond, so that it ends.
- **Short steps** (`Company`, `worker.core.shared_step`): while another tenant was here lately, steps are short and shared by weight.
- **The queue** (`worker.core.queue`): when it is full, a tenant with many waiting gives up its youngest for one with few.

Priorities come first: counters and parts are kept for each of them. With one tenant nothing here changes anything.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

#: (priority, tenant).
Group = tuple[int, str]
#: How far a tenant that asks for less than its part falls behind the others at most, in seconds of the device.
CREDIT_S = 0.1
#: Groups whose service is remembered at most; beyond, those served least are forgotten.
_MOST_GROUPS, _FEW_GROUPS = 10_000, 64
#: For how long a tenant that was here may come back at any moment, in seconds.
LATELY_S = 10.0


class Asked(Protocol):
    """A request, as far as fairness depends on it."""

    @property
    def tenant(self) -> str: ...
    @property
    def priority(self) -> int: ...
    @property
    def weight(self) -> float: ...


class Member(Protocol):
    """A sequence (`worker.core.sequence.Sequence`)."""

    @property
    def request(self) -> Asked: ...
    @property
    def arrival(self) -> int: ...


S = TypeVar("S", bound=Member)


def group_of(s: Member) -> Group:
    """Whom the sequence is served for."""
    return (s.request.priority, s.request.tenant)


class Service:
    """What each group was served for its weight, in seconds of the device; only differences within a priority mean anything.

    Invariants: a group that wants something has an entry; entries of a priority go when nobody of it is here any more.
    """

    def __init__(self) -> None:
        self._served: dict[Group, float] = {}
        self._wanting: set[Group] = set()
        #: Priorities of which somebody is here; groups from which on is looked for those that can be forgotten.
        self._priorities: set[int] = set()
        self._many = _FEW_GROUPS

    def of(self, group: Group) -> float:
        """What it was served."""
        return self._served.get(group, 0.0)

    def charge(self, group: Group, seconds: float, weight: float) -> None:
        """It was served so much more."""
        self._served[group] = self._served.get(group, 0.0) + seconds / weight

    def seen(self, live: Collection[Group], wanting: Collection[Group]) -> None:
        """Who is here between two steps, and who of them has something to be admitted or a prompt to be computed."""
        for group in wanting:
            if group not in self._wanting:
                peers = [self.of(g) for g in wanting if g[0] == group[0] and g in self._wanting]
                others = (self.of(g) for g in live if g[0] == group[0] and g != group)
                self._served[group] = max(self.of(group), (min(peers) if peers else max(others, default=0.0)) - CREDIT_S)
        self._wanting = set(wanting)
        before, self._priorities = self._priorities, {priority for priority, _ in live}
        if not before <= self._priorities:
            self._served = {g: s for g, s in self._served.items() if g[0] in self._priorities}
        if len(self._served) > self._many:
            self._forget(live)
            self._many = max(2 * len(self._served), _FEW_GROUPS)

    def _forget(self, live: Collection[Group]) -> None:
        """Debts of those who left count as long as the others have not caught up. Takes as long as there are groups, and is not due before
        there are twice as many."""
        least: dict[int, float] = {}
        for group in live:
            least[group[0]] = min(least.get(group[0], self.of(group)), self.of(group))
        here = set(live)
        self._served = {g: s for g, s in self._served.items() if g in here or s > least.get(g[0], s)}
        if len(self._served) > _MOST_GROUPS:
            gone = sorted(self._served.keys() - here, key=self._served.__getitem__)[: len(self._served) - _MOST_GROUPS]
            for group in gone:
                del self._served[group]

    def validate(self) -> None:
        """Raise AssertionError when an invariant does not hold."""
        assert self._wanting <= self._served.keys()
        assert all(s >= 0 for s in self._served.values())


class Company:
    """Which groups were here lately: a step that is long for one of them is a wait for the next request of another."""

    def __init__(self) -> None:
        self._at_s: dict[Group, float] = {}

    def seen(self, groups: Iterable[Group], now_s: float) -> None:
        """Who is here between two steps."""
        for group in groups:
            self._at_s[group] = now_s
        if any(now_s - at_s > LATELY_S for at_s in self._at_s.values()):
            self._at_s = {group: at_s for group, at_s in self._at_s.items() if now_s - at_s <= LATELY_S}

    def has(self, group: Group) -> bool:
        """Whether another tenant was here lately that is at least as urgent."""
        return any(tenant != group[1] and priority <= group[0] for priority, tenant in self._at_s)


def in_turns(waiting: list[S], served: Callable[[Group], float], cost_s: Callable[[S], float]) -> list[S]:
    """Those who wait, in the order in which they are admitted: by priority, then tenant by tenant, the one next that was served least for
    its weight, each admission counted as `cost_s` of service. waiting: in the order in which they would go if all were of one tenant,
    which a tenant's own keep."""
    if len({group_of(s) for s in waiting}) == len({s.request.priority for s in waiting}):
        return waiting
    queues: dict[Group, list[tuple[int, S]]] = defaultdict(list)
    for place, s in enumerate(waiting):
        queues[group_of(s)].append((place, s))
    heads = [(group[0], served(group), queue[0][0], 0, group) for group, queue in queues.items()]
    heapq.heapify(heads)
    order = []
    while heads:
        priority, level, _, at, group = heads[0]
        queue = queues[group]
        s = queue[at][1]
        order.append(s)
        if at + 1 < len(queue):
            heapq.heapreplace(heads, (priority, level + cost_s(s) / s.request.weight, queue[at + 1][0], at + 1, group))
        else:
            heapq.heappop(heads)
    return order


@dataclass(slots=True)
class _Part:
    """What a group may hold, and holds."""

    most_places: float
    most_pages: float
    places: int = 0
    pages: int = 0


class Shares:
    """Who holds more than its tenant's part of the device, as of now. Immutable."""

    def __init__(self, here: Iterable[S], groups: Mapping[Group, float], places: int, pages: int, pages_of: Callable[[S], int]) -> None:
        """groups: all that are here or wait, with their weights. places, pages: of the device."""
        weights: dict[int, float] = defaultdict(float)
        tenants: dict[int, int] = defaultdict(int)
        for group, weight in groups.items():
            weights[group[0]] += weight
            tenants[group[0]] += 1
        self._parts = {
            group: _Part(places * weight / weights[group[0]], pages * weight / weights[group[0]])
            for group, weight in groups.items()
            if tenants[group[0]] > 1
        }
        #: Sequences beyond their tenant's part.
        self.beyond: set[Member] = set()
        for s in sorted(here, key=lambda s: s.arrival) if self._parts else ():
            part = self._parts.get(group_of(s))
            if part is None:
                continue
            part.places += 1
            part.pages += pages_of(s)
            if part.places > 1 and (part.places > part.most_places or part.pages > part.most_pages):
                self.beyond.add(s)

    def may_claim(self, group: Group) -> bool:
        """Whether `claims` can be true of any sequence of the group."""
        part = self._parts.get(group)
        return part is not None and (not part.places or part.places + 1 <= part.most_places / 2)

    def claims(self, s: Member, pages: int) -> bool:
        """Whether a waiting sequence that needs so many pages may take the place of what others hold beyond their part: its tenant has
        nothing here, or less than half of its part with it, so that nobody is sent back and forth."""
        if not self.may_claim(group_of(s)):
            return False
        part = self._parts[group_of(s)]
        return part.pages + pages <= (part.most_pages / 2 if part.places else part.most_pages)
