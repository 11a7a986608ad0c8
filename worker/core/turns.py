"""Whose turn a device is where weights come and go, by the configuration's `sharing`: which waiting model is first, and
when a busy one gives way to it.

- `Slices` (`prism`): several models are here at a time. A busy one gives way after a slice of time.
- `Groups` (`swap`): one model at a time, by groups of requests as in QLM (Prism, section 7). A model stays until the
  group that waited when its weights came is served. Then the group with the earliest deadline is next, of whatever
  model; requests that came later are preempted, and are part of their model's next group.
- `OnDemand` (`serverless`): one model at a time, without preemption, as in ServerlessLLM (Prism, section 7). While a
  request of another model waits, a model admits nothing more once the group that waited when its weights came is
  admitted, and leaves when all its answers are complete. An idle model leaves after the time that loading takes. Hints
  wake none.

A group is the live requests of the most urgent priority, so it has an end, and every model gets its turn.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from contracts.residency import Why
from worker.core.resident import Resident
from worker.core.sequence import State

#: A busy model gives way to a waiting one after this time, or after so many times its activation, in seconds.
SLICE_S, SLICE_ACTIVATIONS = 2.0, 20.0


class Slices:
    """See the module."""

    #: Weights of several models are never here together.
    one_at_a_time = False
    #: A hint activates a model.
    heeds_hints = True
    #: Why a busy model gave way.
    why = Why.SLICE

    def __init__(self) -> None:
        #: Expected time of an activation.
        self.load_s: Callable[[Resident], float] = lambda resident: 0.0

    def urgency(self, resident: Resident) -> tuple[float, ...]:
        """The order of models whose requests wait: smaller first. At least one request is live."""
        core = resident.core
        if core.state.order.arbitration is not None:
            return core.scheduling.first_rank(core.live.values())
        return _first_come(resident)

    def wait_s(self, asker: Resident) -> float:
        """Expected time until a busy model gives way, beyond the work that its node reports."""
        return self.slice_s(asker) if asker.crowded_out else 0.0

    def gives_way(self, busy: Resident, asker: Resident, now: float) -> bool:
        """Whether this active model gives way now. It may begin a new group, or stop to admit requests."""
        slice_s = self.slice_s(asker)
        return now - asker.waits_s >= slice_s and now - busy.since_s >= slice_s

    def leaves_s(self, resident: Resident) -> float:
        """When an idle model leaves for which nobody waits; infinite: it stays."""
        return math.inf

    def slice_s(self, asker: Resident) -> float:
        """How long busy models stay before one gives way to this one."""
        return max(SLICE_S, SLICE_ACTIVATIONS * self.load_s(asker))


class Groups(Slices):
    """See the module."""

    one_at_a_time = True
    why = Why.GROUP

    def urgency(self, resident: Resident) -> tuple[float, ...]:
        """See `Slices`. By priority and deadline."""
        return resident.core.scheduling.first_deadline(resident.core.live.values())

    def wait_s(self, asker: Resident) -> float:
        """See `Slices`: a group's work is reported."""
        return 0.0

    def gives_way(self, busy: Resident, asker: Resident, now: float) -> bool:
        """See `Slices`."""
        if busy.group:
            return False
        if busy.core.live and self.urgency(busy) <= self.urgency(asker):
            busy.begin_group()
            return False
        return True


class OnDemand(Slices):
    """See the module."""

    one_at_a_time = True
    heeds_hints = False
    why = Why.GROUP

    def urgency(self, resident: Resident) -> tuple[float, ...]:
        """See `Slices`. By priority, then first come, first served: it knows no targets."""
        return _first_come(resident)

    def wait_s(self, asker: Resident) -> float:
        """See `Slices`: work is reported."""
        return 0.0

    def gives_way(self, busy: Resident, asker: Resident, now: float) -> bool:
        """See `Slices`."""
        busy.core.scheduling.takes = any(s.state is State.WAITING for s in busy.group)
        return not busy.group and not busy.yielding.on_device

    def leaves_s(self, resident: Resident) -> float:
        """See `Slices`."""
        return resident.idle_since_s + self.load_s(resident)


def _first_come(resident: Resident) -> tuple[float, ...]:
    return (min(s.request.priority for s in resident.core.live.values()), resident.waits_s)


def turns_of(sharing: str) -> Slices:
    """The policy of this name."""
    return {"prism": Slices, "swap": Groups, "serverless": OnDemand}[sharing]()
