"""Who computes in the next step, and how many tokens of each.

- A step has at most `step_tokens` tokens. Sequences that decode go first, a token each; prefills share what is left and are cut
  where the budget ends (chunked prefill, Sarathi-Serve).
- Beside decodes that are at least as urgent, prefills have `mixed_tokens` a step: how long a decode waits for its next token is
  bounded by configuration, or by what the step's decodes take, not by the length of other people's prompts.
- While prefills wait, a quarter of the step is theirs. Decodes that do not fit then take turns.
- Prefills stand by priority, then by the moment at which they are due: arrival plus `PATIENCE` times what the rest of the prompt takes
  alone, so that each is late in proportion to what it asks for. Short ones pass long ones, but a sequence is only ever passed by
  what arrived before it was due, so none starves (shortest remaining first would starve long ones, in order of arrival one long
  prompt holds everybody up). Who waits to be admitted stands in the same order, and asks for HBM too (`worker.core.pace`, `device_s`).
- Steps that several tenants share are put together in `worker.core.shared_step`.

Between priorities there is no such mercy: as long as more urgent prompts come than can be computed, less urgent ones wait.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, TypeVar

#: The share of a step that is kept for prefills while some wait: 1 / this.
PREFILL_SHARE = 4
#: What prefills may add to a step at least, however slow they are: they go on.
LEAST_MIXED_TOKENS = 32
#: How many times as long a step may be in which nobody decodes: whoever comes waits until it is over.
ALONE_TIMES = 4.0
#: How many times the time of its own prompt a prefill can be passed for: a turn with most of its history cached hardly waits for a cold
#: prompt. Measured in docs/design/0010.
PATIENCE = 64.0


class HasPriority(Protocol):
    """A request, as far as its turn depends on it."""

    @property
    def priority(self) -> int: ...


class Computes(Protocol):
    """What is asked of a sequence (`worker.core.sequence.Sequence`; the simulator has its own)."""

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
    """What a step may hold. mixed_tokens: of prefills, unless they are more urgent than what decodes. prefill_token_s: what one is
    expected to take."""

    step_tokens: int
    mixed_tokens: int
    prefill_token_s: float


def mixed_tokens(step_s: float, decode_s: float, prefill_token_s: float) -> int | None:
    """How many tokens of prefills fit into a step of `step_s` seconds whose decodes take `decode_s`, or take as long as those where that
    is more, half of the device; into `ALONE_TIMES` as many seconds where nobody decodes. None when `step_s` is 0: no bound."""
    if not step_s:
        return None
    room_s = max(step_s - decode_s, decode_s) if decode_s else ALONE_TIMES * step_s
    return max(LEAST_MIXED_TOKENS, int(room_s / prefill_token_s))


def due_s(s: Computes, alone_s: float) -> float:
    """When a sequence is due that would have what it asks for in so many seconds if it were alone, on the clock of its arrival."""
    return s.arrival_s + PATIENCE * alone_s


def choose(running: Iterable[S], budget: Budget) -> list[tuple[S, int]]:
    """(sequence, tokens) of one step, each at least one token; empty only when nobody runs."""
    decodes: list[S] = []
    prefills: list[S] = []
    for s in running:
        (decodes if s.pending == 1 else prefills).append(s)
    decodes.sort(key=lambda s: (s.request.priority, s.last_chosen, s.arrival))
    prefills.sort(key=lambda s: (s.request.priority, due_s(s, s.pending * budget.prefill_token_s), s.arrival))
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
