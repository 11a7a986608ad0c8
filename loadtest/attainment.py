"""SLO attainment by model: the share of requests whose TTFT, and whose TPOT, keep to their model's objective (Prism,
section 7.1). Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from loadtest.client import Outcome
from loadtest.figures import Slo, spread


def scaled(slos: Mapping[str, Slo], scale: float) -> dict[str, Slo]:
    """`slos` with all times multiplied by `scale`."""

    def times(value: float | None) -> float | None:
        return None if value is None else value * scale

    return {name: Slo(times(slo.ttft_s), times(slo.tpot_s)) for name, slo in slos.items()}


def attainment(outcomes: Sequence[Outcome], slos: Mapping[str, Slo]) -> dict[str, float | None]:
    """`ttft` and `tpot`: shares of `outcomes` that keep to their model's objective. A failed request keeps neither.

    None: no request has such an objective. slos: by model; models without an entry have none.
    """
    ttfts = {name: Slo(ttft_s=slo.ttft_s) for name, slo in slos.items() if slo.ttft_s is not None}
    tpots = {name: Slo(tpot_s=slo.tpot_s) for name, slo in slos.items() if slo.tpot_s is not None}
    return {"ttft": _share(outcomes, ttfts), "tpot": _share(outcomes, tpots)}


def by_model(outcomes: Sequence[Outcome], slos: Mapping[str, Slo]) -> dict[str, dict[str, Any]]:
    """Requests, failures, latencies, objectives and attainment of each model, in the order of their names."""
    found: dict[str, dict[str, Any]] = {}
    for name in sorted({o.model for o in outcomes} | set(slos)):
        own, slo = [o for o in outcomes if o.model == name], slos.get(name, Slo())
        good = [o for o in own if o.error is None]
        found[name] = {
            "requests": len(own),
            "failed": len(own) - len(good),
            "ttft_s": spread(o.ttft_s for o in good),
            "tpot_s": spread(o.tpot_s for o in good if o.tpot_s is not None),
            "slo": {"ttft_s": slo.ttft_s, "tpot_s": slo.tpot_s},
            "attainment": attainment(own, slos),
        }
    return found


def _share(outcomes: Sequence[Outcome], slos: Mapping[str, Slo]) -> float | None:
    kept = [slos[o.model].kept(o) for o in outcomes if o.model in slos]
    return round(sum(kept) / len(kept), 4) if kept else None
