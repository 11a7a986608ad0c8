"""Moves models between devices, one at a time: the old device serves until the new one can.

A move wakes the model on the new device. Once it is active there, turns and hints go there (`leaving`), and the old
device's copy goes when its memory is needed. The sessions' KV follows through the stores, as in every move of a turn.

Where no move helps, two devices may exchange models (`core.model_exchange`): moves one after the other, each begun when
the requests of the one before it have left their old device.

A model that is active on several devices, and has so little to do that one can serve it, leaves all but one in the same
way where other models are cold: its copies take their memory. It uses them again when its work piles up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from contracts.models import ModelState
from scheduler.core.commands import Spare, Wake
from scheduler.core.device import Device, Model
from scheduler.core.fleet import Fleet
from scheduler.core.model_exchange import KV_SHARE, REST_S, exchange, improves
from scheduler.core.model_placement import Demand, Move, moves, pressures, roomiest, spare_copies
from scheduler.core.models import ModelLoad
from scheduler.core.terms import COPY_S

#: Time between two looks, in seconds.
LOOK_S = 5.0
#: Work of a model on all devices, in seconds: with less it leaves further copies, with more it uses them again.
FEW_S, MANY_S = 2.0, COPY_S
#: A move whose model is not active on its new device by then is given up, in seconds.
GIVE_UP_S = 60.0
#: After an exchange was given up there is none for this long, in seconds.
NO_EXCHANGE_S = 600.0
#: For so long a device believes that a model's requests go elsewhere, in seconds: it is told at every look.
SPARE_S = 3 * LOOK_S
#: A model without a request for this long lets its weights go for others (`worker.core.residency`), in seconds.
IDLE_S = 45.0
#: Target for a token of models without one, in seconds: it only weighs demands.
_TPOT_S = 0.05
_HERE = (ModelState.LOADING, ModelState.ACTIVE)


@dataclass(slots=True)
class _Plan:
    """Moves that have not arrived. began_s: when the first of them began; infinite: it has not, since `arrived_s`, when
    the one before it arrived."""

    rest: list[Move]
    began_s: float = math.inf
    arrived_s: float = math.inf


class ModelMoves:
    """See the module. pinned: models that never move. min_nodes: on how many devices a model is kept active; without an
    entry as many as its requests need."""

    def __init__(
        self, fleet: Fleet, pinned: frozenset[str] = frozenset(), min_nodes: Mapping[str, int] | None = None
    ) -> None:
        self._fleet, self._pinned, self._min_nodes = fleet, pinned, dict(min_nodes or {})
        self._due_s = -math.inf
        self._plan: _Plan | None = None
        #: By model: the last move that arrived, and when. It counts until the old copy is gone, for `REST_S` at most.
        self._done: dict[str, tuple[Move, float]] = {}
        self._moved_s: dict[str, float] = {}
        self._exchanges_s = -math.inf
        #: Copies that models do without.
        self._spare: dict[str, frozenset[str]] = {}
        #: KVPR of each device with memory that models share. Replaced, never changed: read on any thread.
        self.pressures: Mapping[str, float] = {}
        #: Moves begun, and ended by whether the model arrived.
        self.begun = self.arrived = self.given_up = 0

    def leaving(self, model: str) -> frozenset[str]:
        """Devices that the model is leaving, as it is active elsewhere."""
        spare, (done, _) = self._spare.get(model, frozenset()), self._done.get(model, (None, 0.0))
        return spare - {done.to} | {done.leaves} if done is not None else spare

    def tick(self, now: float, decides: bool = True) -> list[Wake | Spare]:
        """Look at the devices, if it is time to, and decide."""
        if now < self._due_s:
            return []
        self._due_s = now + LOOK_S
        devices = {name: device for name, device in self._fleet.devices.items() if device.state(now) == "serving"}
        demands, loads = self._demands(devices)
        room = {name: device.device_bytes for name, device in devices.items() if device.device_bytes}
        shared = {name for demand in demands.values() for name in demand.may}
        self.pressures = {name: of.ratio for name, of in pressures(demands.values(), room).items() if name in shared}
        if not decides:
            return []
        self._done = {
            model: (move, at_s)
            for model, (move, at_s) in self._done.items()
            if now - at_s <= REST_S and {move.leaves, move.to} <= set(demands[model].active if model in demands else ())
        }
        self._do_without(demands, loads, room)
        woken = self._move(demands, loads, room, now)
        return [*woken, *self._spared(demands, now)]

    def _spared(self, demands: Mapping[str, Demand], now: float) -> list[Spare]:
        """Tell the devices which weights are not used any more, of models that are active elsewhere."""
        found = []
        for model, demand in demands.items():
            leaving = self.leaving(model) & set(demand.active)
            if len(leaving) < len(demand.active):
                found += [Spare(name, model, now + SPARE_S) for name in sorted(leaving)]
        return found

    def _move(
        self,
        demands: Mapping[str, Demand],
        loads: Mapping[str, Mapping[str, ModelLoad]],
        room: Mapping[str, int],
        now: float,
    ) -> list[Wake]:
        if self._plan is not None:
            return self._go_on(self._plan, demands, loads, room, now)
        for demand in demands.values():
            few = len(demand.active) < self._min_nodes.get(demand.model, 0)
            if few and (to := roomiest(demand, list(demands.values()), room)):
                return [Wake(to, demand.model, now, now + GIVE_UP_S)]
        used = [replace(d, stays=d.stays or self._rests(d.model, now)) for d in self._used(demands) if d.active]
        found = moves(used, room)[:1]
        if not found and now >= self._exchanges_s:
            found = exchange(used, room)
        if not found or self._must_wait(found[0], demands, loads, room):
            return []
        self._plan = _Plan(found)
        return self._begin(self._plan, now)

    def _must_wait(
        self,
        move: Move,
        demands: Mapping[str, Demand],
        loads: Mapping[str, Mapping[str, ModelLoad]],
        room: Mapping[str, int],
    ) -> bool:
        """Whether the move finds no room until models that leave its new device have no requests there."""
        left = room[move.to] - demands[move.model].weight_bytes
        leaving = [d for d in demands.values() if move.to in self.leaving(d.model) & set(d.active)]
        left -= sum(d.kept_bytes for d in demands.values() if move.to in d.active and d not in leaving)
        busy = sum(d.weight_bytes for d in leaving if _has_requests(loads[d.model], move.to))
        return busy > 0 and left - busy < KV_SHARE * room[move.to]

    def _rests(self, model: str, now: float) -> bool:
        return now - self._moved_s.get(model, -math.inf) < REST_S

    def _begin(self, plan: _Plan, now: float) -> list[Wake]:
        """Begin the plan's next move."""
        move = plan.rest[0]
        plan.began_s = self._moved_s[move.model] = now
        self.begun += 1
        return [Wake(move.to, move.model, now, now + GIVE_UP_S, moves=True)]

    def _go_on(
        self,
        plan: _Plan,
        demands: Mapping[str, Demand],
        loads: Mapping[str, Mapping[str, ModelLoad]],
        room: Mapping[str, int],
        now: float,
    ) -> list[Wake]:
        """Note what has arrived or failed, and begin the next move once the requests of the one before it are gone."""
        move = plan.rest[0]
        if math.isfinite(plan.began_s):
            if _is_at(demands, move.model, move.to):
                self._done[move.model] = move, now
                self.arrived += 1
                del plan.rest[0]
                plan.arrived_s, plan.began_s = now, math.inf
            elif now - plan.began_s > GIVE_UP_S or move.to not in room or not _is_at(demands, move.model, move.leaves):
                self.given_up += 1
                self._give_up(plan, now)
        elif now - plan.arrived_s > REST_S or not improves(plan.rest, self._used(demands), room):
            self._give_up(plan, now)
        elif not self._must_wait(move, demands, loads, room):
            return self._begin(plan, now)
        if not plan.rest:
            self._plan = None
        return []

    def _give_up(self, plan: _Plan, now: float) -> None:
        if math.isfinite(plan.arrived_s) or len(plan.rest) > 1:
            self._exchanges_s = now + NO_EXCHANGE_S
        plan.rest.clear()

    def _do_without(
        self, demands: Mapping[str, Demand], loads: Mapping[str, Mapping[str, ModelLoad]], room: Mapping[str, int]
    ) -> None:
        """Decide which copies are spare; what was decided stays, while the model has little to do."""
        before, self._spare = self._spare, {}
        undecided = []
        for model, demand in demands.items():
            most_s = MANY_S if before.get(model) else FEW_S
            copies = len(demand.active)
            if (
                copies <= max(self._min_nodes.get(model, 0), 1)
                or model in self._pinned
                or _work_s(loads[model]) >= most_s
            ):
                continue
            going = {move.to for move in self._plan.rest if move.model == model} if self._plan is not None else set()
            spare = (before.get(model, frozenset()) & set(demand.active)) - going
            if spare and len(spare) < copies:
                self._spare[model] = spare
            else:
                undecided.append(model)
        self._spare |= spare_copies(self._used(demands), undecided, room)
        short = {name for demand in demands.values() for name in demand.may - set(demand.active)}
        self._spare = {model: spare & short for model, spare in self._spare.items() if spare & short}

    def _used(self, demands: Mapping[str, Demand]) -> list[Demand]:
        """The models, with the copies that they use."""
        found = []
        for demand in demands.values():
            leaving = self.leaving(demand.model)
            found.append(replace(demand, active=tuple(name for name in demand.active if name not in leaving)))
        return found

    def _demands(self, devices: Mapping[str, Device]) -> tuple[dict[str, Demand], dict[str, dict[str, ModelLoad]]]:
        """Of all models that some device can bring on and off; and the load of each by device."""
        models: dict[str, Model] = {}
        loads: dict[str, dict[str, ModelLoad]] = {}
        for name, device in devices.items():
            for model in device.models if len(device.models) > 1 else ():
                models[model.name] = model
                loads.setdefault(model.name, {})[name] = device.load.of(model)
        found = {}
        for name, model in sorted(models.items()):
            at = loads[name]
            token_bytes = model.shape.piece_bytes * model.shape.layers / model.shape.chunk_tokens
            rate = sum(load.token_rate for load in at.values())
            idle = name not in self._pinned and min(load.idle_s for load in at.values()) > IDLE_S
            found[name] = Demand(
                name,
                0.0 if idle else rate * token_bytes / (model.tpot_slo_s or _TPOT_S),
                model.weight_bytes,
                tuple(sorted(device for device, load in at.items() if load.state in _HERE)),
                frozenset(at),
                name in self._pinned,
                idle,
                max(load.activation_s for load in at.values()),
            )
        return found, loads


def _work_s(loads: Mapping[str, ModelLoad]) -> float:
    return sum(sum(load.by_priority.values()) for load in loads.values())


def _is_at(demands: Mapping[str, Demand], model: str, device: str) -> bool:
    """Whether the model's weights are on the device, or on their way."""
    demand = demands.get(model)
    return demand is not None and device in demand.active


def _has_requests(loads: Mapping[str, ModelLoad], device: str) -> bool:
    return device in loads and loads[device].running + loads[device].waiting > 0
