"""How often the hints of a tenant and of each of its addresses come true, and how much prefetch they get.

SYMPHONY (section 3.6) leaves adversarial hints open. Here a caller of many false hints gets less prefetch, and later.
Trust never affects requests. A hint that is not prefetched still counts when its request comes, so trust can recover.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

#: The prior of a new address and of a new tenant: this many hints, of which this share came true.
_PRIOR_HINTS, _TENANT_PRIOR_HINTS, _PRIOR_CHANCE = 10.0, 50.0, 0.9
#: Factor by which the record of an address, and of a tenant, fades with each hint.
_FADES, _TENANT_FADES = 0.99, 0.995
#: Below these shares of true hints, a caller's prefetches come after all others, or there are none.
_DOUBTED, _DISTRUSTED = 0.5, 0.1
#: Added to the priority of hints of callers below `_DOUBTED` (higher is less urgent).
DOUBT_PRIORITY = 100
#: Tokens of cache that count as one prefetch.
_TOKENS = 16_384
#: Records kept; the least recently used go first.
_REMEMBERED = 50_000


class Worth(Enum):
    """How a hint is treated: prefetched as it says, prefetched after all others, or recorded without prefetch."""

    FULL = "full"
    BEHIND = "behind"
    NOTED = "noted"


@dataclass(slots=True)
class _Record:
    """How a caller's hints ended (faded sums), and its token bucket."""

    hints: float
    true: float
    fades: float
    tokens: float
    filled_s: float = 0.0

    @property
    def chance(self) -> float:
        return self.true / self.hints


class Trust:
    """See the module. `per_s` and `burst`: the token bucket for prefetches of each tenant and each address."""

    def __init__(self, per_s: float, burst: float) -> None:
        self._per_s, self._burst = per_s, burst
        self._records: dict[tuple[str, str], _Record] = {}  #: least recently used first

    def chance(self, tenant: str, address: str) -> float:
        """The probability that a hint comes true: the lower one of tenant and address."""
        return min(record.chance for record in self._of(tenant, address))

    def worth(self, tenant: str, address: str) -> Worth:
        """How hints of this address are treated, budgets aside."""
        chance = self.chance(tenant, address)
        return Worth.NOTED if chance < _DISTRUSTED else Worth.BEHIND if chance < _DOUBTED else Worth.FULL

    def take(self, tenant: str, address: str, now: float, tokens: int = 0) -> bool:
        """Take the prefetch of a cache of so many tokens from the budgets of tenant and address, which fill in
        proportion to trust.

        A long cache counts as several, and may overdraw. False if either is empty; then nothing is taken.
        """
        cost = max(tokens / _TOKENS, 1.0)
        records = list(self._of(tenant, address))
        for record in records:
            record.tokens = min(
                self._burst, record.tokens + max(now - record.filled_s, 0.0) * self._per_s * record.chance
            )
            record.filled_s = now
        if any(record.tokens < 1.0 for record in records):
            return False
        for record in records:
            record.tokens -= cost
        return True

    def ended(self, tenant: str, address: str, true: float) -> None:
        """A hint ended. true: 1 if its request came, 0 if not, 0.5 if it was withdrawn.

        It counts for the tenant by the square of the address's chance. So one lying address spoils its own record and
        not the tenant's; many spoil the tenant's too.
        """
        weight = 1.0
        for record in self._of(tenant, address):
            believed = record.chance**2
            fades = 1.0 - (1.0 - record.fades) * weight
            record.hints = record.hints * fades + weight
            record.true = record.true * fades + weight * true
            weight = believed

    def _of(self, tenant: str, address: str) -> Iterator[_Record]:
        """The records of the address, if any, and of the tenant, in this order."""
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
            assert -1e-6 <= record.true <= record.hints + 1e-6 and record.tokens <= self._burst
