"""What the scheduler's core tells the stores."""

from __future__ import annotations

from dataclasses import dataclass

from contracts.ids import SessionKey
from scheduler.core.advisories import Hint


@dataclass(frozen=True, slots=True)
class Prefetch:
    """To the store of a device's node: bring the session's cache into DRAM and offer it to the device.

    node: the device's name. `hint.priority` includes the penalty for low trust. sources: other nodes with its cache,
    best first.
    """

    node: str
    hint: Hint
    sources: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Withdraw:
    """To the store of a device's node: evict first what was brought for this session's hint."""

    node: str
    session: SessionKey


@dataclass(frozen=True, slots=True)
class Wake:
    """To a device's worker: a request for this model is expected at `arrival_s`, until `expires_s`, on the scheduler's
    clock. node: the device's name. moves: the model moves there, so that other requests may wait for its weights."""

    node: str
    model: str
    arrival_s: float
    expires_s: float
    moves: bool = False


@dataclass(frozen=True, slots=True)
class Spare:
    """To a device's worker: requests for this model go elsewhere, until `expires_s` on the scheduler's clock. node:
    the device's name."""

    node: str
    model: str
    expires_s: float


Command = Prefetch | Withdraw | Wake | Spare
