"""Moves models between devices: one at a time, and the old device serves until the new one can.

A move wakes the model on the new device. Once it is active there, turns and hints go there (`leaving`), and the old
device's copy goes when its memory is needed. The sessions' KV follows through the stores, as in every move of a turn.

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
from scheduler.core.model_placement import Demand, Move, moves, roomiest, spare_copies
from scheduler.core.models import ModelLoad
from scheduler.core.terms import COPY_S

#: Time between two looks, in seconds.
LOOK_S = 5.0
#: A model moves at most this often, in seconds.
REST_S = 60.0
#: Work of a model on all devices, in seconds: with less it leaves further copies, with more it uses them again.
FEW_S, MANY_S = 2.0, COPY_S
#: A move whose model is not active on its new device by then is given up, in seconds.
GIVE_UP_S = 60.0
#: For so long a device believes that a model's requests go elsewhere, in seconds: it is told at every look.
SPARE_S = 3 * LOOK_S
#: Target for a token of models without one, in seconds: it only weighs demands.
_TPOT_S = 0.05
_HERE = (ModelState.LOADING, ModelState.ACTIVE)


@dataclass(slots=True)
class _UnderWay:
    move: Move
    began_s: float
    #: Since when the new device serves.
    arrived_s: float = math.inf


class ModelMoves:
    """See the module. pinned: models that never move. min_nodes: on how many devices a model is kept active; without an
    entry as many as its requests need."""

    def __init__(
        self, fleet: Fleet, pinned: frozenset[str] = frozenset(), min_nodes: Mapping[str, int] | None = None
    ) -> None:
        self._fleet, self._pinned, self._min_nodes = fleet, pinned, dict(min_nodes or {})
        self._due_s = -math.inf
        self._under_way: _UnderWay | None = None
        self._moved_s: dict[str, float] = {}
        #: Copies that models do without.
        self._spare: dict[str, frozenset[str]] = {}
        #: Moves begun, and ended by whether the model arrived.
        self.begun = self.arrived = self.given_up = 0

    def leaving(self, model: str) -> frozenset[str]:
        """Devices that the model is leaving, as it is active elsewhere."""
        under_way, spare = self._under_way, self._spare.get(model, frozenset())
        if under_way is None or under_way.move.model != model or math.isinf(under_way.arrived_s):
            return spare
        return spare - {under_way.move.to} | {under_way.move.leaves}

    def tick(self, now: float) -> list[Wake | Spare]:
        """Decide, if it is time to."""
        if now < self._due_s:
            return []
        self._due_s = now + LOOK_S
        devices = {name: device for name, device in self._fleet.devices.items() if device.state(now) == "serving"}
        demands, work_s = self._demands(devices)
        room = {name: device.device_bytes for name, device in devices.items() if device.device_bytes}
        self._do_without(demands, work_s, room)
        woken = self._move(demands, room, now)
        return [*woken, *self._spared(demands, now)]

    def _spared(self, demands: Mapping[str, Demand], now: float) -> list[Spare]:
        """Tells the devices which weights are no longer used there."""
        return [
            Spare(name, model, now + SPARE_S)
            for model, demand in demands.items()
            for name in sorted(self.leaving(model) & set(demand.active))
        ]

    def _move(self, demands: Mapping[str, Demand], room: Mapping[str, int], now: float) -> list[Wake]:
        if self._under_way is not None:
            self._go_on(self._under_way, demands, now)
            return []
        for demand in demands.values():
            few = len(demand.active) < self._min_nodes.get(demand.model, 0)
            if few and (to := roomiest(demand, list(demands.values()), room)):
                return [Wake(to, demand.model, now, now + GIVE_UP_S)]
        for move in moves([d for d in self._used(demands) if d.active], room):
            if now - self._moved_s.get(move.model, -math.inf) >= REST_S:
                self._under_way, self._moved_s[move.model] = _UnderWay(move, now), now
                self.begun += 1
                return [Wake(move.to, move.model, now, now + GIVE_UP_S)]
        return []

    def _do_without(self, demands: Mapping[str, Demand], work_s: Mapping[str, float], room: Mapping[str, int]) -> None:
        """Decide which copies are spare; what was decided stays, while the model has little to do."""
        before, self._spare = self._spare, {}
        undecided = []
        for model, demand in demands.items():
            most_s = MANY_S if before.get(model) else FEW_S
            copies = len(demand.active)
            if copies <= max(self._min_nodes.get(model, 0), 1) or model in self._pinned or work_s[model] >= most_s:
                continue
            going = self._under_way.move if self._under_way is not None else None
            spare = before.get(model, frozenset()) & set(demand.active)
            if going is not None and going.model == model:
                spare -= {going.to}
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

    def _go_on(self, under_way: _UnderWay, demands: Mapping[str, Demand], now: float) -> None:
        demand = demands.get(under_way.move.model)
        arrived = demand is not None and under_way.move.to in demand.active
        if arrived and math.isinf(under_way.arrived_s):
            under_way.arrived_s = now
            self.arrived += 1
        late = math.isinf(under_way.arrived_s) and now - under_way.began_s > GIVE_UP_S
        gone = not math.isinf(under_way.arrived_s) and (
            not arrived or demand is None or under_way.move.leaves not in demand.active
        )
        self.given_up += late
        if late or gone or now - under_way.arrived_s > REST_S:
            self._under_way = None

    def _demands(self, devices: Mapping[str, Device]) -> tuple[dict[str, Demand], dict[str, float]]:
        """Of all models that some device can bring on and off; and the seconds of work that each has."""
        models: dict[str, Model] = {}
        loads: dict[str, dict[str, ModelLoad]] = {}
        for name, device in devices.items():
            for model in device.models if len(device.models) > 1 else ():
                models[model.name] = model
                loads.setdefault(model.name, {})[name] = device.load.of(model)
        found = {}
        for name, model in sorted(models.items()):
            token_bytes = model.shape.piece_bytes * model.shape.layers / model.shape.chunk_tokens
            rate = sum(load.token_rate for load in loads[name].values())
            found[name] = Demand(
                name,
                rate * token_bytes / (model.tpot_slo_s or _TPOT_S),
                model.weight_bytes,
                tuple(sorted(at for at, load in loads[name].items() if load.state in _HERE)),
                frozenset(loads[name]),
                name in self._pinned,
            )
        work_s = {name: sum(sum(load.by_priority.values()) for load in at.values()) for name, at in loads.items()}
        return found, work_s
