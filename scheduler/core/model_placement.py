"""Where active models should be (Prism, section 6.1, Algorithm 1): the least KV pressure on every device.

A model's demand is `w = token rate x KV bytes of a token / target for a token`; a device's KV pressure ratio (KVPR) is
the sum of its models' demands over the memory that their weights leave. Models are placed by demand, the greatest
first, each on the device whose pressure becomes least; what stays where it is saves a move. Several active copies of a
model share its demand, and never a device (A.2.2).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

#: A move must lower the pressure that the model sees by this share. The paper gives no value.
TAU = 0.2


@dataclass(frozen=True, slots=True)
class Demand:
    """An active model. w: its demand, of all copies together. active: devices with its weights. may: devices that serve
    it, active or not. stays: it must not move."""

    model: str
    w: float
    weight_bytes: int
    active: tuple[str, ...]
    may: frozenset[str]
    stays: bool = False

    @property
    def each(self) -> float:
        """The demand of one copy."""
        return self.w / max(len(self.active), 1)


@dataclass(frozen=True, slots=True)
class Move:
    """A copy of a model should leave one device for another."""

    model: str
    leaves: str
    to: str


class _Device:
    def __init__(self, bytes_: int) -> None:
        self.left, self.w = bytes_, 0.0

    def ratio(self, w: float = 0.0, weight_bytes: int = 0) -> float:
        """The pressure with a further model; infinite without room for its weights."""
        left = self.left - weight_bytes
        return (self.w + w) / left if left > 0 else math.inf

    def take(self, w: float, weight_bytes: int) -> None:
        self.w += w
        self.left -= weight_bytes


def moves(demands: Sequence[Demand], device_bytes: Mapping[str, int], tau: float = TAU) -> list[Move]:
    """What to move, the greatest demand first. device_bytes: memory for weights and KV, by device.

    Each move, on top of those before it, leaves the new device with less pressure than the old one had, by `tau`: so
    moves never go round in circles.
    """
    planned, real = _filled((), device_bytes), _filled(demands, device_bytes)
    found: list[Move] = []
    for demand in sorted(demands, key=lambda d: (not d.stays, -d.each, d.model)):
        w, weights, taken = demand.each, demand.weight_bytes, set[str]()
        for here in (name for name in demand.active if name in planned):
            able = [name for name in sorted(planned) if name in demand.may - set(demand.active) - taken]
            to = min(able, key=lambda name: planned[name].ratio(w, weights), default=here)
            if (
                not demand.stays
                and w > 0
                and planned[to].ratio(w, weights) < (1.0 - tau) * planned[here].ratio(w, weights)
                and real[to].ratio(w, weights) < (1.0 - tau) * real[here].ratio()
            ):
                found.append(Move(demand.model, here, to))
                real[here].take(-w, -weights)
                real[to].take(w, weights)
            else:
                to = here
            taken.add(to)
            planned[to].take(w, weights)
    return found


def spare_copies(
    demands: Sequence[Demand], models: Collection[str], device_bytes: Mapping[str, int]
) -> dict[str, frozenset[str]]:
    """Of these models, which one device can serve: the devices that they can do without. One copy remains, where the
    pressure becomes least; the greatest demand chooses first."""
    devices = _filled((d for d in demands if d.model not in models), device_bytes)
    found: dict[str, frozenset[str]] = {}
    for demand in sorted(demands, key=lambda d: (-d.w, -d.weight_bytes, d.model)):
        able = [name for name in demand.active if name in devices]
        if demand.model in models and able:
            w, weights = demand.w, demand.weight_bytes
            kept = min(able, key=lambda name: (devices[name].ratio(w, weights), -devices[name].left, name))
            devices[kept].take(w, weights)
            found[demand.model] = frozenset(demand.active) - {kept}
    return found


def pressures(demands: Iterable[Demand], device_bytes: Mapping[str, int]) -> dict[str, float]:
    """The KVPR of each device, 1/s²; infinite where weights leave no memory."""
    return {name: device.ratio() for name, device in _filled(demands, device_bytes).items()}


def _filled(demands: Iterable[Demand], device_bytes: Mapping[str, int]) -> dict[str, _Device]:
    """The devices with all copies of these models."""
    devices = {name: _Device(bytes_) for name, bytes_ in device_bytes.items()}
    for demand in demands:
        for name in demand.active:
            if name in devices:
                devices[name].take(demand.each, demand.weight_bytes)
    return devices


def roomiest(demand: Demand, demands: Sequence[Demand], device_bytes: Mapping[str, int]) -> str:
    """The device of the least pressure for a further copy of a model; empty: there is none with room."""
    devices = _filled(demands, device_bytes)
    able = [name for name in sorted(devices) if name in demand.may and name not in demand.active]
    best = min(able, key=lambda name: devices[name].ratio(demand.w, demand.weight_bytes), default="")
    return best if best and devices[best].ratio(demand.w, demand.weight_bytes) < math.inf else ""
