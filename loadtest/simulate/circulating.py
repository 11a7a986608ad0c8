"""How long steps of a model take whose layers take turns in shared slots (MIRAGE, section 5.4; what
`worker.models.circulating` does). Decides nothing.

When a layer has been computed, the copy of its slot's next layer begins, one copy at a time. A step waits for a layer
that is not there. Copies take no memory bandwidth from computing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from loadtest.simulate.costs import Costs

#: Most steps until the pipeline counts as periodic; steps then differ by less than a copy over so many steps.
_MOST_STEPS = 64
#: Steps ahead over which the growth of a step is taken.
_AHEAD = 64


def periodic_step_s(layers: int, chosen: Sequence[int], slots: int, layer_s: float, transfer_s: float) -> float:
    """Seconds of a step, one of many alike: `chosen` of the layers, in their order, take turns in `slots`; layer_s
    computes a layer, transfer_s copies one."""
    count = len(chosen)
    following = {
        layer: chosen[rank + slots if rank + slots < count else rank % slots] for rank, layer in enumerate(chosen)
    }
    # A slot of one layer keeps it.
    here_s = dict.fromkeys(chosen[:slots], 0.0)
    now_s = free_s = 0.0
    ends_s, seen = [0.0], [(0.0,) * (slots + 1)]
    for _ in range(_MOST_STEPS):
        computed = 0
        for layer in chosen:
            now_s = max(now_s + (layer - computed) * layer_s, here_s[layer]) + layer_s
            computed = layer + 1
            if (after := following[layer]) != layer:
                here_s[after] = free_s = max(free_s, now_s) + transfer_s
        now_s += (layers - computed) * layer_s
        late = (*(max(here_s[layer] - now_s, 0.0) for layer in chosen[:slots]), max(free_s - now_s, 0.0))
        for number, before in enumerate(seen):
            if all(abs(a - b) <= 1e-9 * transfer_s for a, b in zip(late, before, strict=True)):
                return (now_s - ends_s[number]) / (len(ends_s) - number)
        ends_s.append(now_s)
        seen.append(late)
    half = len(ends_s) // 2
    mean_s = (ends_s[-1] - ends_s[half]) / (len(ends_s) - 1 - half)
    # Copies that take barely longer than a step pile up over more steps than these before a layer waits.
    return max(mean_s, transfer_s * sum(after != layer for layer, after in following.items()))


class CirculatingCosts:
    """`Costs` of a model that may lend layers. transfer_s: a copy of one. chosen, slots: layers that take turns now, in
    so many slots; whoever carries lending out sets them."""

    def __init__(self, inner: Costs, layers: int, transfer_s: float) -> None:
        self._inner, self.layers, self.transfer_s = inner, layers, transfer_s
        self.chosen: Sequence[int] = ()
        self.slots = 0

    def _with_copies(self, seconds: float) -> float:
        if not self.slots:
            return seconds
        return periodic_step_s(self.layers, self.chosen, self.slots, seconds / self.layers, self.transfer_s)

    def decode(self, batch: int, context_tokens: float) -> tuple[float, float]:
        """See Costs."""
        seconds, slope_s = self._inner.decode(batch, context_tokens)
        if not self.slots:
            return seconds, slope_s
        tokens = _AHEAD * batch
        first_s, later_s = self._with_copies(seconds), self._with_copies(seconds + tokens * slope_s)
        return first_s, (later_s - first_s) / tokens

    def mixed_s(self, batch: int, context_tokens: float, prefills: Iterable[tuple[int, int]]) -> float:
        """See Costs."""
        return self._with_copies(self._inner.mixed_s(batch, context_tokens, prefills))

    def prefill_s(self, tokens: int, context_tokens: int) -> float:
        """See Costs."""
        return self._with_copies(self._inner.prefill_s(tokens, context_tokens))
