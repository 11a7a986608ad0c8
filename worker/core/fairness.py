"""How tenants share the device within a priority, by weight, so that no tenant waits for another's flood to end.

- **Turns** (`Service`): of the tenants that have something to compute or to admit, the one served least for its weight
  goes next (virtual token counters: Sheng et al., "Fairness in Serving Large Language Models", OSDI '24; here seconds
  of the device). A tenant that returns is raised to `CREDIT_S` below the least served tenant that waits: its credit for
  idle time is bounded, and service while no other tenant waited is no debt.
- **Places** (`Shares`): while several tenants are here, each has a share of places and pages by weight. What a tenant
  holds beyond its share can be preempted for a tenant that holds less than half of its own. A tenant's oldest sequence
  is never beyond the share, so it ends.
- **Short steps** (`Company`, `worker.core.shared_step`): while several tenants were here lately, steps are short and
  shared by weight.
- **The queue** (`worker.core.queue`): when it is full, the latest request of a tenant with many is refused for a tenant
  with few.

Priorities come first: each has its own counters and shares. With a single tenant nothing here has an effect.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

#: (priority, tenant).
Group = tuple[int, str]
#: Maximum credit of a tenant that asks for less than its share, in seconds of the device.
CREDIT_S = 0.1
#: Maximum number of groups whose service is remembered (the least served are forgotten first), and the size from which
#: pruning starts.
_MOST_GROUPS, _FEW_GROUPS = 10_000, 64
#: How long a tenant that has left still counts as here, in seconds.
LATELY_S = 10.0


class Asked(Protocol):
    """The part of a request that fairness needs."""

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
    """The group that the sequence is charged to."""
    return (s.request.priority, s.request.tenant)


class Service:
    """Service of each group divided by its weight, in seconds of the device. Only differences within a priority matter.

    Invariants: a group that wants something has an entry; a priority's entries are dropped when none of its groups is
    here.
    """

    def __init__(self) -> None:
        self._served: dict[Group, float] = {}
        self._wanting: set[Group] = set()
        #: Priorities with a group here; number of entries that triggers the next pruning.
        self._priorities: set[int] = set()
        self._many = _FEW_GROUPS

    def of(self, group: Group) -> float:
        """Service of the group so far."""
        return self._served.get(group, 0.0)

    def charge(self, group: Group, seconds: float, weight: float) -> None:
        """Charge the group for `seconds` of the device."""
        self._served[group] = self._served.get(group, 0.0) + seconds / weight

    def seen(self, live: Collection[Group], wanting: Collection[Group]) -> None:
        """Update the groups that are here between two steps, and those with something to admit or a prompt to
        compute."""
        for group in wanting:
            if group not in self._wanting:
                peers = [self.of(g) for g in wanting if g[0] == group[0] and g in self._wanting]
                others = (self.of(g) for g in live if g[0] == group[0] and g != group)
                self._served[group] = max(
                    self.of(group), (min(peers) if peers else max(others, default=0.0)) - CREDIT_S
                )
        self._wanting = set(wanting)
        before, self._priorities = self._priorities, {priority for priority, _ in live}
        if not before <= self._priorities:
            self._served = {g: s for g, s in self._served.items() if g[0] in self._priorities}
        if len(self._served) > self._many:
            self._forget(live)
            self._many = max(2 * len(self._served), _FEW_GROUPS)

    def _forget(self, live: Collection[Group]) -> None:
        """Drop groups that have left, except those served more than the least served group here. Linear, and amortised:
        runs again only when entries have doubled."""
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
    """Groups that were here lately: a long step for one of them delays the next request of another."""

    def __init__(self) -> None:
        self._at_s: dict[Group, float] = {}

    def seen(self, groups: Iterable[Group], now_s: float) -> None:
        """Update the groups that are here between two steps."""
        for group in groups:
            self._at_s[group] = now_s
        if any(now_s - at_s > LATELY_S for at_s in self._at_s.values()):
            self._at_s = {group: at_s for group, at_s in self._at_s.items() if now_s - at_s <= LATELY_S}

    def has(self, group: Group) -> bool:
        """Whether another tenant of equal or higher priority was here lately."""
        return any(tenant != group[1] and priority <= group[0] for priority, tenant in self._at_s)


def in_turns(waiting: list[S], served: Callable[[Group], float], cost_s: Callable[[S], float]) -> list[S]:
    """Waiting sequences in admission order: by priority, then the tenant least served for its weight, each admission
    counted as `cost_s` of service. waiting: in the order within a tenant."""
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
    """What a group may hold, and what it holds."""

    most_places: float
    most_pages: float
    places: int = 0
    pages: int = 0


class Shares:
    """Sequences beyond their tenant's share of the device, as of now. Immutable."""

    def __init__(
        self, here: Iterable[S], groups: Mapping[Group, float], places: int, pages: int, pages_of: Callable[[S], int]
    ) -> None:
        """groups: all groups here or waiting, with their weights. places, pages: of the whole device."""
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
        #: Sequences beyond their tenant's share.
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
        """Whether `claims` can be true for any sequence of the group."""
        part = self._parts.get(group)
        return part is not None and (not part.places or part.places + 1 <= part.most_places / 2)

    def claims(self, s: Member, pages: int) -> bool:
        """Whether a waiting sequence that needs `pages` pages may preempt sequences beyond their share: its tenant has
        nothing here, or would hold at most half of its share, so that preemption does not go back and forth."""
        if not self.may_claim(group_of(s)):
            return False
        part = self._parts[group_of(s)]
        return part.pages + pages <= (part.most_pages / 2 if part.places else part.most_pages)
