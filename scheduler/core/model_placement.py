"""Where active models should be (Prism, section 6.1, Algorithm 1): the least KV pressure on every device.

A model's demand is `w = token rate x KV bytes of a token / target for a token`; a device's KV pressure ratio (KVPR) is
the sum of its models' demands over the memory that their weights leave. Models are placed by demand, the greatest
first, each on the device whose pressure becomes least; what stays where it is saves a move. Several active copies of a
model share its demand, and never a device (A.2.2).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

#: A move must lower the pressure that the model sees by this share. The paper gives no value.
TAU = 0.2


@dataclass(frozen=True, slots=True)
class Demand:
    """An active model. w: its demand, of all copies together. active: devices with its weights. may: devices that serve
    it, active or not. stays: it must not move. idle: so long that its weights go when others need their memory. load_s:
    time until its weights are on another device."""

    model: str
    w: float
    weight_bytes: int
    active: tuple[str, ...]
    may: frozenset[str]
    stays: bool = False
    idle: bool = False
    load_s: float = 0.0

    @property
    def kept_bytes(self) -> int:
        """What the weights of a copy keep from KV."""
        return 0 if self.idle else self.weight_bytes

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


@dataclass(frozen=True, slots=True)
class Pressure:
    """A device: bytes that weights leave, and the sum of its models' demands."""

    left: int
    w: float = 0.0

    @property
    def ratio(self) -> float:
        """The KVPR; infinite without room for KV."""
        return self.w / self.left if self.left > 0 else math.inf

    def beside(self, demand: Demand) -> Pressure:
        """With a copy of a model."""
        return Pressure(self.left - demand.kept_bytes, self.w + demand.each)

    def without(self, demand: Demand) -> Pressure:
        """Without a copy of a model."""
        return Pressure(self.left + demand.kept_bytes, self.w - demand.each)


def moves(demands: Sequence[Demand], device_bytes: Mapping[str, int], tau: float = TAU) -> list[Move]:
    """What to move, the greatest demand first. device_bytes: memory for weights and KV, by device.

    Each move, on top of those before it, leaves the new device with less pressure than the old one had, by `tau`: so
    moves never go round in circles.
    """
    planned, real = pressures((), device_bytes), pressures(demands, device_bytes)
    found: list[Move] = []
    for demand in sorted(demands, key=lambda d: (not d.stays, -d.each, d.model)):
        taken = set[str]()
        for here in (name for name in demand.active if name in planned):
            able = [name for name in sorted(planned) if name in demand.may - set(demand.active) - taken]
            to = min(able, key=lambda name: planned[name].beside(demand).ratio, default=here)
            if (
                not demand.stays
                and demand.w > 0
                and planned[to].beside(demand).ratio < (1.0 - tau) * planned[here].beside(demand).ratio
                and real[to].beside(demand).ratio < (1.0 - tau) * real[here].ratio
            ):
                found.append(Move(demand.model, here, to))
                real[here], real[to] = real[here].without(demand), real[to].beside(demand)
            else:
                to = here
            taken.add(to)
            planned[to] = planned[to].beside(demand)
    return found


def spare_copies(
    demands: Sequence[Demand], models: Collection[str], device_bytes: Mapping[str, int]
) -> dict[str, frozenset[str]]:
    """Of these models, which one device can serve: the devices that they can do without. One copy remains, where the
    pressure becomes least; the greatest demand chooses first."""
    devices = pressures((d for d in demands if d.model not in models), device_bytes)
    found: dict[str, frozenset[str]] = {}
    for demand in sorted(demands, key=lambda d: (-d.w, -d.weight_bytes, d.model)):
        able = [name for name in demand.active if name in devices]
        if demand.model in models and able:
            alone = replace(demand, active=tuple(able[:1]))
            kept = min(able, key=lambda name: (devices[name].beside(alone).ratio, -devices[name].left, name))
            devices[kept] = devices[kept].beside(alone)
            found[demand.model] = frozenset(demand.active) - {kept}
    return found


def pressures(demands: Iterable[Demand], device_bytes: Mapping[str, int]) -> dict[str, Pressure]:
    """The devices with all copies of these models."""
    devices = {name: Pressure(bytes_) for name, bytes_ in device_bytes.items()}
    for demand in demands:
        for name in demand.active:
            if name in devices:
                devices[name] = devices[name].beside(demand)
    return devices


def roomiest(demand: Demand, demands: Sequence[Demand], device_bytes: Mapping[str, int]) -> str:
    """The device of the least pressure for a further copy of a model; empty: there is none with room."""
    devices, further = pressures(demands, device_bytes), replace(demand, active=(), idle=False)
    able = [name for name in sorted(devices) if name in demand.may and name not in demand.active]
    best = min(able, key=lambda name: devices[name].beside(further).ratio, default="")
    return best if best and devices[best].beside(further).ratio < math.inf else ""
