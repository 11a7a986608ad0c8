"""The systems that are compared, and what a run gives. Variants of production's controller are made here.

- `recompute`: vLLM: fixed parts of memory, a preempted request computes its KV again.
- `preempt`: ours without lending: memory that models share, KV of a preempted request is kept in host memory.
- `remap`: production's controller. `even`: it, with the paper's choice of layers and slots.
- `alpha+1`, `alpha+2`: always one slot, always two. `kept`: nothing comes back. `uncapped`: no bound but the layers.
- `LRU`: of idle models, the one that was used longest ago lends first.
- `pie`: KV beyond the device's memory is swapped in and out in each step (Pie).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from loadtest.simulate.costs import Costs
from loadtest.simulate.many import Answered, ManyRun, ModelRequest, SharedFleet, simulate_many
from loadtest.simulate.mechanisms import IN_MEMORY, NONE
from loadtest.simulate.shared_kind import GRANULE_BYTES, SharedKind, SharedModel
from loadtest.simulate.token_gaps import TokenGaps, percentiles
from worker.core.balloon import Share
from worker.core.lending import Lending
from worker.core.remap import Remap
from worker.core.resident import Resident

#: `worker.remap_cap` by default.
CAP = 0.5
#: Part of the link's rate that is left when KV goes both ways (MIRAGE, section 3.2).
BOTH_WAYS = 0.85


class OneSlot(Lending):
    """Always one slot (section 7.5, A)."""

    def slots_for(self, lent: int, decodes: int) -> int | None:
        """As many layers as production's, in one slot."""
        found = Lending.slots_for(self, lent, decodes)
        return min(found, 1) if found is not None else None

    @property
    def slow(self) -> bool:
        """Steps may be slow: that is what is measured."""
        return False


class TwoSlots(Lending):
    """Always two slots (section 7.5, B)."""

    def slots_for(self, lent: int, decodes: int) -> int | None:
        """As many layers as production's, in two slots where there are so many layers."""
        found = Lending.slots_for(self, lent, decodes)
        return 2 if found and lent + 2 <= self.layers else found

    @property
    def slow(self) -> bool:
        """See `OneSlot`."""
        return False


class Even(Lending):
    """The paper's choice: layers evenly spaced, one slot where equation (4) holds (section 5.2). Nearly all layers that
    take turns are others after a change."""

    @property
    def circulating(self) -> list[int]:
        """See `Lending`."""
        count = self.lent + self.slots
        return [rank * self.layers // count for rank in range(count)]

    def slots_for(self, lent: int, decodes: int) -> int | None:
        """As many layers as production's, in one slot where that suffices."""
        found = Lending.slots_for(self, lent, decodes)
        fits = self.transfer_s * (lent + 1) <= self.layer_s(decodes) * (self.layers - lent - 1)
        return 1 if found and fits else found


class Uncapped(Lending):
    """It lends whatever it has (section 7.6.2)."""

    def slots_for(self, lent: int, decodes: int) -> int | None:
        """Two slots, unless there are too few layers."""
        return 0 if lent == 0 else 2 if lent + 2 <= self.layers else None

    def idle_most(self) -> int:
        """All but two."""
        return self.layers - 2

    @property
    def slow(self) -> bool:
        """See `OneSlot`."""
        return False


class Kept(Remap):
    """What is lent stays lent (section 7.6.1)."""

    def round(self, now: float) -> None:
        """Take nothing back."""
        self._moved = False


class LeastRecent(Remap):
    """Idle models that were used longest ago lend first (figure 11)."""

    def _able(self, asker: Share, now: float) -> list[tuple[Resident, Lending, int]]:
        found = Remap._able(self, asker, now)
        idle = [each for each in found if each[0].share is not asker]
        return sorted(idle, key=lambda each: each[0].idle_since_s) + found[len(idle) :]


@dataclass(frozen=True, slots=True)
class Arm:
    """A system. lending, remap: classes in place of production's."""

    sharing: str
    cap: float = 0.0
    keeps: bool = True
    lending: type[Lending] = Lending
    remap: type[Remap] = Remap


ARMS = {
    "recompute": Arm("static", keeps=False),
    "preempt": Arm("prism"),
    "remap": Arm("prism", CAP),
    "even": Arm("prism", CAP, lending=Even),
    "alpha+1": Arm("prism", CAP, lending=OneSlot),
    "alpha+2": Arm("prism", CAP, lending=TwoSlots),
    "kept": Arm("prism", CAP, remap=Kept),
    "uncapped": Arm("prism", 1.0, lending=Uncapped),
    "uncapped, kept": Arm("prism", 1.0, lending=Uncapped, remap=Kept),
    "LRU": Arm("prism", CAP, remap=LeastRecent),
    "pie": Arm("static", keeps=False),
}


class Swapping:
    """`Costs` of a model whose KV beyond `tokens` goes in and out in each step, while others are computed (Pie)."""

    def __init__(self, inner: Costs, tokens: float, token_bytes: float, bytes_per_s: float) -> None:
        self._inner, self._tokens, self._token_s = inner, tokens, token_bytes / bytes_per_s

    def _swap_s(self, context_tokens: float) -> float:
        return max(context_tokens - self._tokens, 0.0) * self._token_s

    def decode(self, batch: int, context_tokens: float) -> tuple[float, float]:
        """See Costs."""
        seconds, slope_s = self._inner.decode(batch, context_tokens)
        swap_s = self._swap_s(context_tokens)
        return (swap_s, self._token_s) if swap_s > seconds else (seconds, slope_s)

    def mixed_s(self, batch: int, context_tokens: float, prefills: Iterable[tuple[int, int]]) -> float:
        """See Costs."""
        each = list(prefills)
        swap_s = self._swap_s(context_tokens + sum(count + before for count, before in each))
        return max(self._inner.mixed_s(batch, context_tokens, each), swap_s)

    def prefill_s(self, tokens: int, context_tokens: int) -> float:
        """See Costs."""
        return self._inner.prefill_s(tokens, context_tokens)


def swapping(kind: SharedKind) -> SharedKind:
    """The device of one model with as much KV more as goes both ways during a step of one sequence (Pie expands while
    its swaps are hidden)."""
    (model,) = kind.models
    shape, rate = model.kind.shape, BOTH_WAYS * kind.copy_bytes_s
    token_bytes = shape.chunk_bytes / shape.chunk_tokens
    tokens = (kind.granules - model.granules) * GRANULE_BYTES / token_bytes
    more = int(rate * model.kind.costs.decode(1, tokens)[0] / GRANULE_BYTES)
    costs = Swapping(model.kind.costs, tokens, token_bytes, rate)
    changed = SharedModel(replace(model.kind, costs=costs), model.weight_bytes)
    return replace(kind, models=(changed,), granules=kind.granules + more)


def run(kind: SharedKind, arm: str, requests: Sequence[ModelRequest]) -> dict[str, Any]:
    """One run's figures. `held`: False where the longest request does not fit."""
    made, row = ARMS[arm], {"arm": arm, "requests": len(requests)}

    def prepare(fleet: SharedFleet) -> None:
        for device in fleet.devices.values():
            if (residency := device.residency) is None or not made.cap:
                continue
            residency.remap = made.remap(residency.balloon, lambda: residency.models.values(), residency.out.append)
            residency.balloon.lend = residency.remap.lend
            for resident in residency.models.values():
                if resident.lending is not None:
                    resident.lending = resident.core.lending = _as(made.lending, resident.lending)

    whole = swapping(kind) if arm == "pie" else kind
    setting = ManyRun(
        whole,
        1,
        made.sharing,  # type: ignore[arg-type]
        lead_s=0.0,
        has=IN_MEMORY if made.keeps else NONE,
        remap_cap=made.cap,
        prepare=prepare,
    )
    try:
        outcome = simulate_many(setting, requests)
    except ValueError as error:
        return row | {"held": False, "why": str(error)}
    device = outcome.fleet.devices["device-0"]
    return (
        row
        | {"held": True}
        | figures(outcome.answers, [hosted.gaps for hosted in device.models.values()])
        | {name: round(value, 1) for name, value in outcome.totals.items()}
        | {"layers_moved": device.weights.moved if device.weights is not None else 0}
    )


def _as(kind: type[Lending], made: Lending) -> Lending:
    return kind(**{each.name: getattr(made, each.name) for each in fields(made) if not each.name.startswith("_")})


def figures(answers: Sequence[Answered], gaps: Iterable[TokenGaps]) -> dict[str, float]:
    """Times of all requests, and tokens a second until the last one has ended."""
    ended = [a for a in answers if a.end_s >= 0]
    p50, p90, p99 = percentiles(gaps, (50, 90, 99))
    ttft, whole = [a.ttft_s for a in ended], [a.end_s - a.asked.time_s for a in ended]
    span_s = max(a.end_s for a in ended) - min(a.asked.time_s for a in answers)
    return {
        "unfinished": len(answers) - len(ended),
        "tbt_p50_ms": round(1000 * p50, 2),
        "tbt_p90_ms": round(1000 * p90, 2),
        "tbt_p99_ms": round(1000 * p99, 2),
        "ttft_p50_s": round(float(np.percentile(ttft, 50)), 4),
        "ttft_p99_s": round(float(np.percentile(ttft, 99)), 4),
        "latency_p50_s": round(float(np.percentile(whole, 50)), 4),
        "latency_p99_s": round(float(np.percentile(whole, 99)), 4),
        "tokens_per_s": round(sum(a.asked.output_tokens for a in ended) / span_s, 1),
    }
