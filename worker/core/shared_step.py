"""Which sequences compute in a step that several tenants share, and how many tokens of each.

Such a step is short, so that a new request never waits for a long one. It is filled by priority. Within a priority each
tenant gets its share of the time by weight, plus what it was served less than another (`worker.core.fairness`); unused
time goes to the others. So a tenant's short prompt is computed in the next step, and one tenant's decodes take no time
from another's prompts.

Within a tenant the rules are those of `worker.core.batching`: decodes take turns, prompts are ordered by due time and
get at least a quarter.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from worker.core.batching import PREFILL_SHARE, Computes, by_due_time
from worker.core.fairness import Asked, Group

#: A shared step may take at least this many times a lone decode, which is mostly reading the weights.
LONE_TIMES = 3.0
#: Minimum tokens of a tenant's next prompt per step. Each step has a fixed cost, so smaller pieces would slow a slow
#: machine further.
LEAST_PIECE = 16


class Runs(Computes, Protocol):
    """The part of a sequence that this needs (`worker.core.sequence.Sequence`)."""

    @property
    def request(self) -> Asked: ...


S = TypeVar("S", bound=Runs)


@dataclass(frozen=True, slots=True)
class Room:
    """Limits of a step: tokens, and seconds beyond its fixed cost. decode_s, prefill_token_s: seconds that one decode
    or one prompt token adds."""

    tokens: int
    seconds: float
    decode_s: float
    prefill_token_s: float


def room_of(step_tokens: int, step_s: float, lone_decode_s: float, decode_s: float, prefill_token_s: float) -> Room:
    """The room of a step of `step_s` seconds, or of `LONE_TIMES * lone_decode_s` if that is longer."""
    return Room(
        step_tokens,
        max(step_s, LONE_TIMES * lone_decode_s) - max(lone_decode_s - decode_s, 0.0),
        decode_s,
        prefill_token_s,
    )


def share(
    running: Iterable[S],
    room: Room,
    served: Callable[[Group], float],
    rank: Callable[[S, float], tuple[bool, float]] = by_due_time,
) -> list[tuple[S, int]]:
    """(sequence, tokens) of one step, at least one token each; empty only if `running` is. served: service of a group
    (`fairness.Service.of`). rank: see `batching.choose`."""
    classes: dict[int, dict[str, list[S]]] = defaultdict(lambda: defaultdict(list))
    for s in running:
        classes[s.request.priority][s.request.tenant].append(s)
    step: _Step[S] = _Step(room)
    for priority, tenants in sorted(classes.items()):
        levels = {tenant: served((priority, tenant)) for tenant in tenants}
        queues = {
            tenant: _Queue(tenants[tenant], room.prefill_token_s, rank)
            for tenant in sorted(tenants, key=levels.__getitem__)
        }
        whole_s, weights, most = step.left_s, sum(queue.weight for queue in queues.values()), max(levels.values())
        for tenant, queue in queues.items():
            step.take(queue, whole_s * queue.weight / weights + (most - levels[tenant]) * queue.weight)
        for queue in queues.values():
            step.take(queue, step.left_s)
    return list(step.chosen.items())


class _Queue(Generic[S]):
    """A tenant's decodes and prompts, next first. begun: the step holds some; prompt_begun: some of a prompt."""

    def __init__(
        self, members: list[S], prefill_token_s: float, rank: Callable[[S, float], tuple[bool, float]]
    ) -> None:
        self.weight, self.begun, self.prompt_begun = members[0].request.weight, False, False
        self.decodes = deque(sorted((s for s in members if s.pending == 1), key=lambda s: (s.last_chosen, s.arrival)))
        prompts = (s for s in members if s.pending > 1)
        self.prompts = deque(sorted(prompts, key=lambda s: (rank(s, s.pending * prefill_token_s), s.arrival)))


class _Step(Generic[S]):
    """A step being filled."""

    def __init__(self, room: Room) -> None:
        self.chosen: dict[S, int] = {}
        self.left_s, self._left_tokens, self._room = room.seconds, room.tokens, room

    def take(self, queue: _Queue[S], seconds: float) -> None:
        """Fill up to `seconds`, or what is left, from the queue. While any room is left, a tenant gets at least one
        decode and one piece of a prompt, even if the step then exceeds its time."""
        room, seconds = self._room, min(seconds, self.left_s)
        decodes_s = seconds * (1 - 1 / PREFILL_SHARE) if queue.prompts else seconds
        while queue.decodes and self._left_tokens and (decodes_s >= room.decode_s or (seconds > 0 and not queue.begun)):
            taken_s = self._add(queue, queue.decodes.popleft(), 1, room.decode_s)
            seconds, decodes_s = seconds - taken_s, decodes_s - taken_s
        while queue.prompts and self._left_tokens and seconds > 0:
            s = queue.prompts[0]
            left, fit = s.pending - self.chosen.get(s, 0), int(seconds / room.prefill_token_s)
            count = min(left, self._left_tokens, fit if queue.prompt_begun else max(fit, LEAST_PIECE))
            if not count:
                return
            if count == left:
                queue.prompts.popleft()
            queue.prompt_begun = True
            seconds -= self._add(queue, s, count, room.prefill_token_s)

    def _add(self, queue: _Queue[S], s: S, count: int, token_s: float) -> float:
        queue.begun = True
        self.chosen[s] = self.chosen.get(s, 0) + count
        self._left_tokens -= count
        self.left_s -= count * token_s
        return count * token_s
