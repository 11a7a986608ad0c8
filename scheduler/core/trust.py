"""How often the hints of a tenant, and of one address of it, come true; and how much prefetch they get for it.

SYMPHONY (section 3.6) leaves adversarial hints open. Here a hint costs what it is worth: whoever sends many that do not come true gets less
prefetch, and later. Placement of requests never looks at trust: nobody gets less service.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

#: What is believed of a caller of whom nothing is known: so many hints, of which so many came true.
_PRIOR_HINTS, _PRIOR_TRUE = 10.0, 9.0
#: The memory: older hints fade as new ones come.
_FADES = 0.99
#: Of those that come true this rarely, hints rank behind others', or are not followed but for one in `_RETRY_EVERY`.
_DOUBTED, _DISTRUSTED = 0.5, 0.1
_RETRY_EVERY = 16
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
    """How hints of one caller ended, faded; how many came; and the tokens of its bucket."""

    hints: float = _PRIOR_HINTS
    true: float = _PRIOR_TRUE
    seen: int = 0
    tokens: float = 0.0
    filled_s: float = 0.0

    @property
    def chance(self) -> float:
        return self.true / self.hints


class Trust:
    """See the module. A caller is a tenant, or a tenant's address; `per_s` and `burst` bound the hints of each that are prefetched."""

    def __init__(self, per_s: float, burst: float) -> None:
        self._per_s, self._burst = per_s, burst
        self._records: dict[tuple[str, str], _Record] = {}

    def chance(self, tenant: str, address: str) -> float:
        """The chance that a hint from there comes true: of the tenant or the address, whichever is less."""
        return min(self._record(tenant, a).chance for a in {"", address})

    def worth(self, tenant: str, address: str, now: float) -> Worth:
        """What the next hint from there is worth. Takes it from the budgets."""
        records = [self._record(tenant, a) for a in {"", address}]
        worth = Worth.FULL
        for record in records:
            record.seen += 1
            record.tokens = min(self._burst, record.tokens + (now - record.filled_s) * self._per_s * record.chance)
            record.filled_s = now
            if record.chance < _DISTRUSTED and record.seen % _RETRY_EVERY:
                worth = Worth.NOTED
            elif record.chance < _DOUBTED and worth is Worth.FULL:
                worth = Worth.BEHIND
        if worth is Worth.NOTED or any(record.tokens < 1.0 for record in records):
            return Worth.NOTED
        for record in records:
            record.tokens -= 1.0
        return worth

    def ended(self, tenant: str, address: str, true: float) -> None:
        """A hint came true (1), did not (0), or was withdrawn (0.5: it had a cost, but was not a lie)."""
        for a in {"", address}:
            record = self._record(tenant, a)
            record.hints = record.hints * _FADES + 1.0
            record.true = record.true * _FADES + true

    def _record(self, tenant: str, address: str) -> _Record:
        record = self._records.get((tenant, address))
        if record is None:
            while len(self._records) >= _REMEMBERED:
                del self._records[next(iter(self._records))]
            record = self._records[(tenant, address)] = _Record(tokens=self._burst)
        return record

    def validate(self) -> None:
        """Raise AssertionError when a record is impossible."""
        for record in self._records.values():
            assert -1e-6 <= record.true <= record.hints + 1e-6 and record.tokens <= self._burst
