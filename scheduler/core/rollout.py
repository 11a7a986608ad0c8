"""Which worker is started again, and when, so that devices serve models that were made after they had started.

Rules:
1. One device at a time, and the next one only when the last is back. One that stays away stops the rollout.
2. Only when all other devices with the base model serve, or not known models; one that has been away for `AWAY_S` does
   not count.
3. A device that alone serves some model waits for a moment without requests (`QUIET_S`), at most for `WAIT_S`.
4. A device that trains gives its job away first, within `CLEAR_S`.
5. A device is started again for a model once. If it comes back without it, the model's events say why.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

AWAY_S, QUIET_S, WAIT_S, CLEAR_S = 600.0, 3.0, 120.0, 60.0
#: Seconds until a command that shows no effect is sent again.
AGAIN_S = 30.0


@dataclass(slots=True)
class Adoption:
    """A model that devices with its base shall serve; once it is gone, none shall. asked: devices that were, or need
    not be, started again for that. serve: devices that have been seen with it."""

    name: str
    base: str
    asked: list[str] = field(default_factory=list)
    serve: list[str] = field(default_factory=list)
    gone: bool = False

    def remove(self) -> None:
        """It shall not be served any more."""
        self.gone, self.asked, self.serve = True, [], []

    def differs(self, device: str, seat: Seat) -> bool:
        """Whether the device may be started again for it."""
        if device in self.asked:
            return False
        return self.name in seat.models if self.gone else self.base in seat.models and self.name not in seat.models


@dataclass(frozen=True, slots=True)
class Seat:
    """A device now. models: that our engine serves; empty: not known. instance: of its worker. away_s: since its
    worker left; 0: it is here. requests: that are outstanding. trains: it has a job. left_out: adopted models that its
    worker could not start with, and why."""

    models: frozenset[str]
    instance: str
    serving: bool = True
    away_s: float = 0.0
    requests: int = 0
    trains: bool = False
    left_out: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Restart:
    """To a device's worker, if it is still this instance: drain, end, and be started again."""

    device: str
    instance: str


@dataclass(frozen=True, slots=True)
class Told:
    """An event of a model. level: as of the jobs' events."""

    name: str
    message: str
    level: str = "info"


@dataclass(slots=True)
class _Current:
    """The device whose turn it is. instance: then. sent_s: when it was last told; None: it is being cleared."""

    device: str
    instance: str
    since_s: float
    sent_s: float | None = None
    adoptions: tuple[str, ...] = ()


class Rollout:
    """See the module."""

    def __init__(self) -> None:
        self._current: _Current | None = None
        #: By device that alone serves some model: since when it waits, and since when it has had no requests.
        self._waits: dict[str, tuple[float, float | None]] = {}

    @property
    def clearing(self) -> str:
        """The device that shall not train now; empty: none."""
        return self._current.device if self._current is not None else ""

    def tick(
        self, adoptions: Sequence[Adoption], seats: Mapping[str, Seat], now: float
    ) -> tuple[list[Restart], list[Told]]:
        """Time has passed. Mutates the adoptions. seats: every device that is known, by name."""
        told = [t for adoption in adoptions for t in _seen(adoption, seats)]
        if self._current is not None and self._over(self._current, adoptions, seats, told):
            self._current = None
        if self._current is None:
            self._choose(adoptions, seats, now)
        current = self._current
        if current is None:
            return [], told
        seat = seats.get(current.device)
        if seat is None or not seat.serving or seat.instance != current.instance:
            return [], told
        if current.sent_s is None:
            if seat.trains and now - current.since_s < CLEAR_S:
                return [], told
            if not self._may(current.device, adoptions, seats, now):
                self._current = None
                return [], told
            lacked = _lacked(current.device, seat, adoptions)
            current.adoptions = tuple(adoption.name for adoption in lacked)
            for adoption in lacked:
                adoption.asked.append(current.device)
                what = "without" if adoption.gone else "to serve"
                told.append(Told(adoption.name, f"{current.device} is started again {what} {adoption.name}"))
        elif now - current.sent_s < AGAIN_S:
            return [], told
        current.sent_s = now
        return [Restart(current.device, current.instance)], told

    def _over(
        self, current: _Current, adoptions: Sequence[Adoption], seats: Mapping[str, Seat], told: list[Told]
    ) -> bool:
        """Whether the device's turn is over; says what has not come of it."""
        seat = seats.get(current.device)
        if current.sent_s is None:  # whatever happened to it was not ours
            return seat is None or not seat.serving or seat.instance != current.instance or not adoptions
        if seat is None or not seat.serving or seat.instance == current.instance:
            return False
        gone = {adoption.name for adoption in adoptions if adoption.gone}
        for name in current.adoptions:
            if name in gone:
                still = "still serves" if name in seat.models else "does not serve"
                told.append(Told(name, f"{current.device} {still} {name}", "warn" if name in seat.models else "info"))
            elif name not in seat.models:
                why = seat.left_out.get(name) or "its worker does not find it, or ended with an error; see its log"
                told.append(Told(name, f"{current.device} does not serve {name}: {why}", "warn"))
        return True

    def _choose(self, adoptions: Sequence[Adoption], seats: Mapping[str, Seat], now: float) -> None:
        found = [name for name, seat in seats.items() if seat.serving and _lacked(name, seat, adoptions)]
        self._waits = {name: waits for name, waits in self._waits.items() if name in found}
        for name in found:
            since_s, quiet_s = self._waits.get(name, (now, None))
            quiet_s = None if seats[name].requests else now if quiet_s is None else quiet_s
            self._waits[name] = (since_s, quiet_s)
        for name in sorted(found, key=lambda name: (seats[name].trains, seats[name].requests, name)):
            if self._may(name, adoptions, seats, now):
                self._current = _Current(name, seats[name].instance, now)
                return

    def _may(self, device: str, adoptions: Sequence[Adoption], seats: Mapping[str, Seat], now: float) -> bool:
        """Rules 2 and 3."""
        bases = {adoption.base for adoption in _lacked(device, seats[device], adoptions)}
        needed = seats[device].models - {adoption.name for adoption in adoptions if adoption.gone}
        others = [seat for name, seat in seats.items() if name != device]
        away = [seat for seat in others if not seat.serving and seat.away_s < AWAY_S]
        if not bases or any(bases & seat.models or not seat.models for seat in away):
            return False
        if needed <= frozenset[str]().union(*(seat.models for seat in others if seat.serving)):
            return True
        since_s, quiet_s = self._waits.get(device, (now, None))
        return now - since_s >= WAIT_S or (quiet_s is not None and now - quiet_s >= QUIET_S)


def _lacked(device: str, seat: Seat, adoptions: Sequence[Adoption]) -> list[Adoption]:
    """The models for which the device may be started again."""
    return [adoption for adoption in adoptions if adoption.differs(device, seat)]


def _seen(adoption: Adoption, seats: Mapping[str, Seat]) -> list[Told]:
    """Note the devices that serve the model, and those that have left it out by themselves."""
    told = list[Told]()
    if adoption.gone:
        return told
    for device, seat in sorted(seats.items()):
        if not seat.serving:
            continue
        if adoption.name in seat.models and device not in adoption.serve:
            adoption.serve.append(device)
            told.append(Told(adoption.name, f"served as {adoption.name} on {device}"))
        elif adoption.name in seat.left_out and adoption.name not in seat.models and device not in adoption.asked:
            adoption.asked.append(device)
            why = seat.left_out[adoption.name]
            told.append(Told(adoption.name, f"{device} does not serve {adoption.name}: {why}", "warn"))
    return told
