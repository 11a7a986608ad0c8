"""Moves models between devices: one at a time, and the old device serves until the new one can.

A move wakes the model on the new device. Once it is active there, turns and hints go there (`leaving`), and the old
device's copy goes when its memory is needed. The sessions' KV follows through the stores, as in every move of a turn.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from contracts.models import ModelState
from scheduler.core.commands import Wake
from scheduler.core.device import Device, Model
from scheduler.core.fleet import Fleet
from scheduler.core.model_placement import Demand, Move, moves, roomiest
from scheduler.core.models import ModelLoad

#: Time between two looks, in seconds.
LOOK_S = 5.0
#: A model moves at most this often, in seconds.
REST_S = 60.0
#: A move whose model is not active on its new device by then is given up, in seconds.
GIVE_UP_S = 60.0
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
        #: Moves begun, and ended by whether the model arrived.
        self.begun = self.arrived = self.given_up = 0

    def leaving(self, model: str) -> frozenset[str]:
        """Devices that the model is leaving, as it is active elsewhere."""
        under_way = self._under_way
        if under_way is None or under_way.move.model != model or math.isinf(under_way.arrived_s):
            return frozenset()
        return frozenset((under_way.move.leaves,))

    def tick(self, now: float) -> list[Wake]:
        """Decide, if it is time to."""
        if now < self._due_s:
            return []
        self._due_s = now + LOOK_S
        devices = {name: device for name, device in self._fleet.devices.items() if device.state(now) == "serving"}
        demands = self._demands(devices)
        if self._under_way is not None:
            self._go_on(self._under_way, demands, now)
            return []
        room = {name: device.device_bytes for name, device in devices.items() if device.device_bytes}
        for demand in demands.values():
            few = len(demand.active) < self._min_nodes.get(demand.model, 0)
            if few and (to := roomiest(demand, list(demands.values()), room)):
                return [Wake(to, demand.model, now, now + GIVE_UP_S)]
        for move in moves([d for d in demands.values() if d.active], room):
            if now - self._moved_s.get(move.model, -math.inf) >= REST_S:
                self._under_way, self._moved_s[move.model] = _UnderWay(move, now), now
                self.begun += 1
                return [Wake(move.to, move.model, now, now + GIVE_UP_S)]
        return []

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

    def _demands(self, devices: Mapping[str, Device]) -> dict[str, Demand]:
        """Of all models that some device can bring on and off."""
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
        return found
