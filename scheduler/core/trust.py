"""How often the hints of a tenant, and of one address of it, come true; and how much prefetch they get for it.

SYMPHONY (section 3.6) leaves adversarial hints open. Here a hint costs what it is worth: whoever sends many that do not come true gets less
prefetch, and later. Placement of requests never looks at trust: nobody gets less service. A hint that is not followed is remembered all the
same, so that whoever sends true ones again is believed again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

#: What is believed of an address, and of a tenant, of whom nothing is known: so many hints, of which that share came true.
_PRIOR_HINTS, _TENANT_PRIOR_HINTS, _PRIOR_CHANCE = 10.0, 50.0, 0.9
#: The memory of each: older hints fade as new ones come.
_FADES, _TENANT_FADES = 0.99, 0.995
#: Of those that come true this rarely, hints rank behind others', or are not followed.
_DOUBTED, _DISTRUSTED = 0.5, 0.1
#: By how much the hints of doubtful callers are less urgent.
DOUBT_PRIORITY = 100
_REMEMBERED = 50_000


class Worth(Enum):
    """What a hint is worth: prefetched as it says, prefetched behind those of others, or only remembered."""

    FULL = "full"
    BEHIND = "behind"
    NOTED = "noted"


@dataclass(slots=True)
class _Record:
    """How hints of one caller ended, faded; and the tokens of its bucket."""

    hints: float
    true: float
    fades: float
    tokens: float
    filled_s: float = 0.0

    @property
    def chance(self) -> float:
        return self.true / self.hints


class Trust:
    """See the module. A caller is a tenant, or a tenant's address; `per_s` and `burst` bound the hints of each that are prefetched."""

    def __init__(self, per_s: float, burst: float) -> None:
        self._per_s, self._burst = per_s, burst
        self._records: dict[tuple[str, str], _Record] = {}  #: the one used longest ago first

    def chance(self, tenant: str, address: str) -> float:
        """The chance that a hint from there comes true: of the tenant or the address, whichever is less."""
        return min(record.chance for record in self._of(tenant, address))

    def worth(self, tenant: str, address: str) -> Worth:
        """What hints from there are worth, budgets aside."""
        chance = self.chance(tenant, address)
        return Worth.NOTED if chance < _DISTRUSTED else Worth.BEHIND if chance < _DOUBTED else Worth.FULL

    def take(self, tenant: str, address: str, now: float) -> bool:
        """One prefetch out of the budgets of both; False, and nothing taken, when one has none left. Budgets fill as trust allows."""
        records = list(self._of(tenant, address))
        for record in records:
            record.tokens = min(self._burst, record.tokens + max(now - record.filled_s, 0.0) * self._per_s * record.chance)
            record.filled_s = now
        if any(record.tokens < 1.0 for record in records):
            return False
        for record in records:
            record.tokens -= 1.0
        return True

    def ended(self, tenant: str, address: str, true: float) -> None:
        """A hint came true (1), did not (0), or was withdrawn (0.5: it had a cost, but was not a lie).

        It counts for the tenant only as far as the address is believed, by the square of its chance: one address that lies spoils its
        own name, and not that of the tenant's other users; many that lie spoil the tenant's.
        """
        weight = 1.0
        for record in self._of(tenant, address):
            believed = record.chance**2
            fades = 1.0 - (1.0 - record.fades) * weight
            record.hints = record.hints * fades + weight
            record.true = record.true * fades + weight * true
            weight = believed

    def _of(self, tenant: str, address: str) -> Iterator[_Record]:
        """The records of the address and of the tenant, in this order."""
        if address:
            yield self._record(tenant, address)
        yield self._record(tenant, "")

    def _record(self, tenant: str, address: str) -> _Record:
        record = self._records.pop((tenant, address), None)
        if record is None:
            while len(self._records) >= _REMEMBERED:
                del self._records[next(iter(self._records))]
            hints = _PRIOR_HINTS if address else _TENANT_PRIOR_HINTS
            record = _Record(hints, hints * _PRIOR_CHANCE, _FADES if address else _TENANT_FADES, self._burst)
        self._records[(tenant, address)] = record
        return record

    def validate(self) -> None:
        """Raise AssertionError when a record is impossible."""
        assert len(self._records) <= _REMEMBERED
        for record in self._records.values():
            assert -1e-6 <= record.true <= record.hints + 1e-6 and -1e-6 <= record.tokens <= self._burst
