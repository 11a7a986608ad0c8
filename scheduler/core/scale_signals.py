"""What an autoscaler should know of the fleet: work, memory and SLO attainment. Pure; read from the scheduler's state.

- *Work* is in seconds of a device, as placement counts it (`terms.work_s`): what a request adds to the time of the
  requests beside it, by the worker's measured pace or its latency profile. It arrives with requests that workers
  report for the first time, each with its model's typical work.
- *HBM*: pages that running requests hold; what is only cached leaves at no cost.
- *Sessions that may come back*: the whole cache of those used within `RESUMABLE_S`, against the DRAM of serving nodes.
  Prefixes that sessions share count for each, so it is never too low.
- *SLO attainment*: of the answers of the last `ATTAINED_S`, by target; over all models, weighted by answers.

A device whose worker is silent is no capacity, but its work counts: somebody will have to do it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from scheduler.core.device import Device
from scheduler.core.directory import Directory
from scheduler.core.fleet import Fleet
from scheduler.core.models import ModelLoad
from scheduler.core.recent import Recent

#: Answers that count for attainment came within this time, in seconds.
ATTAINED_S = 300.0
#: The targets.
TTFT, TPOT = "ttft", "tpot"
#: Most answers that one report may count, and most models that are counted: a gateway is believed, within reason.
_MOST_TURNS, _MOST_MODELS = 1_000_000, 1_000


@dataclass(frozen=True, slots=True)
class ModelSignals:
    """One model. work_s: outstanding seconds of work on all devices. arriving: seconds of work that arrive a second.
    nodes: that serve it. attainment: by target; targets without an answer are missing. turns: the same, answers."""

    work_s: float = 0.0
    arriving: float = 0.0
    nodes: int = 0
    attainment: Mapping[str, float] = field(default_factory=dict)
    turns: Mapping[str, int] = field(default_factory=dict)

    @property
    def work_s_a_node(self) -> float:
        """Outstanding seconds of work, over the nodes that serve it; all of it while none does."""
        return self.work_s / max(self.nodes, 1)


@dataclass(frozen=True, slots=True)
class Signals:
    """The fleet at one time.

    nodes, devices: that serve. starting_nodes: others that are coming. arriving: seconds of work a second. work_s:
    outstanding. hbm: of the serving devices, shares of KV memory that running requests hold, summed. resumable_bytes:
    KV of sessions that may come back; dram_bytes: of the serving nodes. attainment: the lower of both targets'; None:
    no answer had one. turns: answers that it counts. unmeasured: serving devices whose worker has measured nothing yet
    and has no profile. work_s_of: outstanding seconds by device and model. incomplete: why not to act; empty: complete.
    """

    nodes: int = 0
    starting_nodes: int = 0
    devices: int = 0
    devices_a_node: int = 1
    arriving: float = 0.0
    work_s: float = 0.0
    hbm: float = 0.0
    resumable_bytes: float = 0.0
    dram_bytes: float = 0.0
    attainment: float | None = None
    turns: int = 0
    unmeasured: int = 0
    models: Mapping[str, ModelSignals] = field(default_factory=dict)
    work_s_of: Mapping[tuple[str, str], float] = field(default_factory=dict)
    incomplete: str = ""

    @property
    def work_by_device(self) -> dict[str, float]:
        """Outstanding seconds by device."""
        found: dict[str, float] = {}
        for (device, _), seconds in self.work_s_of.items():
            found[device] = found.get(device, 0.0) + seconds
        return found

    @property
    def hbm_needed(self) -> float:
        """Share of the serving devices' KV memory that running requests hold."""
        return self.hbm / self.devices if self.devices else 0.0

    @property
    def dram_needed(self) -> float:
        """Share of the serving nodes' DRAM that sessions that may come back need; above 1: some are on SSD or blob."""
        return self.resumable_bytes / self.dram_bytes if self.dram_bytes else 0.0


class Attained:
    """Answers that kept to their models' targets, as gateways report them."""

    def __init__(self) -> None:
        self._recent: Recent[tuple[str, str, bool]] = Recent(ATTAINED_S, ATTAINED_S / 30)
        self._models: set[str] = set()

    def add(self, model: str, target: str, turns: int, kept: int, now: float) -> bool:
        """Count answers. False: the report makes no sense, and nothing is counted."""
        if target not in (TTFT, TPOT) or not 0 <= kept <= turns <= _MOST_TURNS or not model:
            return False
        if model not in self._models and len(self._models) >= _MOST_MODELS:
            return False
        self._models.add(model)
        self._recent.add((model, target, True), kept, now)
        self._recent.add((model, target, False), turns - kept, now)
        return True

    def counts(self, now: float) -> dict[str, dict[str, tuple[int, int]]]:
        """By model and target: answers of the window, and those that kept to it. Without an answer: missing."""
        sums = self._recent.sums(now)
        found: dict[str, dict[str, tuple[int, int]]] = {}
        for model, target, _ in sums:
            kept, missed = round(sums.get((model, target, True), 0)), round(sums.get((model, target, False), 0))
            if kept + missed:
                found.setdefault(model, {})[target] = kept + missed, kept
        return found


def signals(
    fleet: Fleet, directory: Directory, attained: Attained, now: float, wall: float, *, gathering: bool = False
) -> Signals:
    """The signals at `now`. wall: the time of day, which sessions' last use is in. gathering: the scheduler does not
    know its fleet yet. Mutates nothing but forgets what has left the windows."""
    devices = list(fleet.devices.values())
    states = {device.name: device.state(now) for device in devices}
    # A device that is suspect for its past serves all the same; one that is silent or stalled does not.
    serving = [d for d in devices if states[d.name] in ("serving", "suspect") and not d.stalled(now)]
    silent = [d.name for d in devices if states[d.name] == "suspect" and d.stalled(now) == "silent"]
    here = {device.node.name for device in serving}
    coming = {d.node.name for d in devices if states[d.name] == "starting"} - here
    arriving, kept = fleet.arrived.rates(now), attained.counts(now)
    work_s_of = _work(device for device in devices if device.worker_here)
    loads = {device.name: device.loads for device in serving}
    names = sorted({*fleet.registered, *arriving, *kept, *(model for _, model in work_s_of)} - {""})
    models = {
        name: _of_model(name, work_s_of, arriving.get(name, 0.0), kept.get(name, {}), serving, loads) for name in names
    }
    attainment, turns = _overall(kept.values())
    incomplete = (
        "the scheduler has just started" if gathering else f"no report from {', '.join(silent[:3])}" if silent else ""
    )
    nodes = [fleet.nodes[name] for name in here]
    return Signals(
        nodes=len(here),
        starting_nodes=len(coming),
        devices=len(serving),
        devices_a_node=max((len(node.devices) for node in nodes), default=1),
        arriving=sum(arriving.values()),
        work_s=sum(work_s_of.values()),
        hbm=sum(_hbm_share(device, loads[device.name]) for device in serving),
        resumable_bytes=directory.resumable.bytes(wall),
        dram_bytes=float(sum(node.dram_bytes_total for node in nodes)),
        attainment=attainment,
        turns=turns,
        unmeasured=sum(not _measured(loads[device.name]) for device in serving),
        models=models,
        work_s_of=work_s_of,
        incomplete=incomplete,
    )


def _work(devices: Iterable[Device]) -> dict[tuple[str, str], float]:
    """Outstanding seconds by (device, model): as the workers report them, plus placements since. What is placed for a
    model that the device does not name counts for no model."""
    found: dict[tuple[str, str], float] = {}
    for device in devices:
        loads = device.loads
        for model, load in loads.items():
            found[device.name, model] = _finite(sum(load.by_priority.values()))
        for placed in list(device.unconfirmed.values()):
            key = device.name, placed.model if placed.model in loads else ""
            found[key] = found.get(key, 0.0) + placed.seconds
    return found


def _of_model(
    name: str,
    work_s_of: Mapping[tuple[str, str], float],
    arriving: float,
    kept: Mapping[str, tuple[int, int]],
    serving: Iterable[Device],
    loads: Mapping[str, Mapping[str, ModelLoad]],
) -> ModelSignals:
    return ModelSignals(
        work_s=sum(seconds for (_, model), seconds in work_s_of.items() if model == name),
        arriving=arriving,
        nodes=len({device.node.name for device in serving if name in loads[device.name]}),
        attainment={target: good / turns for target, (turns, good) in kept.items()},
        turns={target: turns for target, (turns, _) in kept.items()},
    )


def _overall(kept: Iterable[Mapping[str, tuple[int, int]]]) -> tuple[float | None, int]:
    """The lower share of both targets over all models, and the answers that it counts."""
    of_all = list(kept)
    shares = []
    for target in (TTFT, TPOT):
        turns = sum(of[target][0] for of in of_all if target in of)
        if turns:
            shares.append((sum(of[target][1] for of in of_all if target in of) / turns, turns))
    return min(shares) if shares else (None, 0)


def _hbm_share(device: Device, loads: Mapping[str, ModelLoad]) -> float:
    """The part of a device's KV memory that running requests hold, from 0 to 1."""
    used = sum(load.kv_bytes_used for load in loads.values())
    if len(loads) == 1:
        room = sum(load.kv_bytes_limit for load in loads.values())
    else:  # models that share a device could each take most of it
        room = used + sum(load.kv_bytes_cached for load in loads.values()) + device.load.device_bytes_free
    return min(used / room, 1.0) if room > 0 else 0.0


def _measured(loads: Mapping[str, ModelLoad]) -> bool:
    return any(load.request_s > 0 or load.prefill_token_s > 0 for load in loads.values())


def _finite(seconds: float) -> float:
    return seconds if math.isfinite(seconds) and seconds > 0 else 0.0
