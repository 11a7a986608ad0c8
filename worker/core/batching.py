"""Which sequences compute in the next step, and how many tokens of each.

- A step has at most `step_tokens` tokens. Decodes go first, one token each; prefills share the rest and are cut where
  the budget ends (chunked prefill, Sarathi-Serve).
- Beside decodes of equal or higher priority, prefills get `mixed_tokens` per step, so configuration and the decodes
  themselves bound the time between tokens, not the length of prompts.
- While prefills wait, a quarter of the step is reserved for them. Decodes that do not fit take turns.
- Prefills are ordered by priority, then by due time: arrival plus `MAX_PREFILL_STRETCH` times what the rest of the
  prompt takes alone. Short prompts pass long ones, but only requests that arrived before a sequence was due can pass
  it, so none starves (docs/design/0010). Admission uses the same order, with HBM added to the cost (`Pace.device_s`).
  Where models have targets, `worker.core.arbitration` gives the order.
- Steps that several tenants share are composed in `worker.core.shared_step`.

Priorities do not age: a lower priority waits for as long as higher ones fill the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol, TypeVar

#: 1 / this of a step is reserved for prefills while some wait.
PREFILL_SHARE = 4
#: Minimum prefill tokens per mixed step, however slow the device.
LEAST_MIXED_TOKENS = 32
#: A step without decodes may take this many times as long: only arrivals wait for its end.
ALONE_TIMES = 4.0
#: A prefill can be passed for this many times its own compute time. Measured in docs/design/0010.
MAX_PREFILL_STRETCH = 64.0


class HasPriority(Protocol):
    """The part of a request that ordering needs."""

    @property
    def priority(self) -> int: ...


class Computes(Protocol):
    """The part of a sequence that batching needs (`worker.core.sequence.Sequence`, or the simulator's)."""

    @property
    def request(self) -> HasPriority: ...
    @property
    def pending(self) -> int: ...
    @property
    def arrival(self) -> int: ...
    @property
    def arrival_s(self) -> float: ...
    @property
    def last_chosen(self) -> int: ...


S = TypeVar("S", bound=Computes)


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of a step. mixed_tokens: for prefills that are not more urgent than the decodes. prefill_token_s: expected
    time of one prefill token."""

    step_tokens: int
    mixed_tokens: int
    prefill_token_s: float


def mixed_tokens(step_s: float, decode_s: float, prefill_token_s: float) -> int | None:
    """Prefill tokens that fit into a step whose decodes take `decode_s` seconds.

    The step may take `step_s`, or twice `decode_s` if that is longer, so prefills get at least half of the device;
    without decodes, `ALONE_TIMES * step_s`. None if `step_s` is 0: no bound.
    """
    if not step_s:
        return None
    room_s = max(step_s - decode_s, decode_s) if decode_s else ALONE_TIMES * step_s
    return max(LEAST_MIXED_TOKENS, int(room_s / prefill_token_s))


def due_s(s: Computes, alone_s: float) -> float:
    """Due time of a sequence whose work takes `alone_s` seconds alone, on the clock of `arrival_s`."""
    return s.arrival_s + MAX_PREFILL_STRETCH * alone_s


def by_due_time(s: Computes, alone_s: float) -> tuple[bool, float]:
    """The order of prefills without targets."""
    return False, due_s(s, alone_s)


def choose(
    running: Iterable[S], budget: Budget, rank: Callable[[S, float], tuple[bool, float]] = by_due_time
) -> list[tuple[S, int]]:
    """(sequence, tokens) of one step, at least one token each; empty only if `running` is. rank: orders prefills of a
    priority (`arbitration.Order.rank`)."""
    decodes: list[S] = []
    prefills: list[S] = []
    for s in running:
        (decodes if s.pending == 1 else prefills).append(s)
    decodes.sort(key=lambda s: (s.request.priority, s.last_chosen, s.arrival))
    prefills.sort(key=lambda s: (s.request.priority, rank(s, s.pending * budget.prefill_token_s), s.arrival))
    kept = min(budget.step_tokens // PREFILL_SHARE, sum(s.pending for s in prefills))
    chosen = [(s, 1) for s in decodes[: budget.step_tokens - kept]]
    left, mixed = budget.step_tokens - len(chosen), budget.mixed_tokens
    for s in prefills:
        count = min(s.pending, left)
        if not decodes or decodes[0].request.priority <= s.request.priority:
            count = min(count, mixed)
        if count <= 0:
            break
        chosen.append((s, count))
        left -= count
        mixed -= count
    return chosen
