"""Which models should change places where no single move helps (Prism, section 6.1; exchanges are ours).

A move needs room on the new device. Where that is full of lighter models, some of them go to the old device in return.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from scheduler.core.model_placement import TAU, Demand, Move, Pressure, pressures

#: Models that were moved stay for at least this time, in seconds: what a move costs counts as a share of it.
REST_S = 60.0
#: Part of a device that its models' weights leave for KV while models change places.
KV_SHARE = 1 / 16


def exchange(demands: Sequence[Demand], device_bytes: Mapping[str, int], tau: float = TAU) -> list[Move]:
    """Moves between two devices that together leave the greater pressure of both by `tau` lower, and by the time that
    the weights take to come: a model of the more loaded device, and models in return. In an order in which each has
    room. Empty: there are none. device_bytes: as `model_placement.moves`.

    The greatest pressure of the two falls, so exchanges, and moves among them, come to an end.
    """
    devices, best, most = pressures(demands, device_bytes), list[Move](), 0.0
    here = {
        name: [d for d in sorted(demands, key=lambda d: d.model) if name in d.active and not d.stays and not d.idle]
        for name in devices
    }
    for loaded in sorted(devices):
        for other in sorted(devices):
            before = devices[loaded].ratio
            if before <= devices[other].ratio:
                continue
            back = [d for d in here[other] if loaded in d.may and loaded not in d.active]
            for demand in here[loaded]:
                if not demand.w or other not in demand.may or other in demand.active:
                    continue
                a, b = devices[loaded].without(demand), devices[other].beside(demand)
                returned, a, b = _returned(back, a, b)
                seconds = demand.load_s + sum(d.load_s for d in returned)
                after = max(a.ratio, b.ratio)
                if returned and before - after > most and after < (1.0 - tau - seconds / REST_S) * before:
                    wanted = [(demand, loaded, other), *((d, other, loaded) for d in returned)]
                    if ordered := _ordered(wanted, {loaded: devices[loaded], other: devices[other]}, device_bytes):
                        best, most = ordered, before - after
    return best


def improves(wanted: Sequence[Move], demands: Sequence[Demand], device_bytes: Mapping[str, int]) -> bool:
    """Whether these moves together lower the greatest pressure of their devices."""
    devices, by_name = pressures(demands, device_bytes), {d.model: d for d in demands}
    touched = {name for move in wanted for name in (move.leaves, move.to)}
    if not touched <= devices.keys() or any(move.model not in by_name for move in wanted):
        return False
    before = max(devices[name].ratio for name in touched)
    for move in wanted:
        demand = by_name[move.model]
        devices[move.to], devices[move.leaves] = devices[move.to].beside(demand), devices[move.leaves].without(demand)
    return max(devices[name].ratio for name in touched) < before


def _returned(able: Sequence[Demand], a: Pressure, b: Pressure) -> tuple[list[Demand], Pressure, Pressure]:
    """Of b's models those that should go to a, one after the other, as long as that helps; and both devices then."""
    found: list[Demand] = []
    while rest := [d for d in able if d not in found]:
        best = min(rest, key=lambda d: _worse(a.beside(d), b.without(d)))
        if _worse(a.beside(best), b.without(best)) >= _worse(a, b):
            break
        found.append(best)
        a, b = a.beside(best), b.without(best)
    return found, a, b


def _worse(a: Pressure, b: Pressure) -> tuple[float, int]:
    """The greater pressure of both; where weights do not fit, by what is lacking."""
    return max(a.ratio, b.ratio), -min(a.left, b.left, 0)


def _ordered(
    wanted: Sequence[tuple[Demand, str, str]], devices: dict[str, Pressure], device_bytes: Mapping[str, int]
) -> list[Move]:
    """The moves in an order in which the weights of each find room beside all that are still there; empty: there is no
    such order."""
    found, rest = list[Move](), list(wanted)
    while rest:
        able = [each for each in rest if devices[each[2]].beside(each[0]).left >= KV_SHARE * device_bytes[each[2]]]
        if not able:
            return []
        demand, leaves, to = first = max(able, key=lambda each: devices[each[2]].left - each[0].weight_bytes)
        rest.remove(first)
        found.append(Move(demand.model, leaves, to))
        devices[to], devices[leaves] = devices[to].beside(demand), devices[leaves].without(demand)
    return found
