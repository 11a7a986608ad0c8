"""Where lending pays: what equations (4) and (5) allow, what production's controller allows, and what steps then
take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from bench.mirage.arms import CAP
from bench.mirage.devices import C1, LINKS, STEP_S, device
from loadtest.simulate.circulating import periodic_step_s
from loadtest.simulate.costs import Roofline, Slowed, seed
from loadtest.simulate.many import ManyRun, ModelRequest, SharedFleet, simulate_many
from loadtest.simulate.presets import ACTIVATION_BYTES, GH200, H100, OPT_13B
from loadtest.simulate.shared_kind import SharedKind
from worker.core.lending import Lending, circulating
from worker.core.pace import Pace

#: Batch and its tokens at which r is set: KV of OPT-13b's part is about full (table 1).
BATCH, CONTEXT = 24, 9_000.0


def layer_s() -> float:
    """T_c of OPT-13b at this batch."""
    return Slowed(Roofline(GH200, OPT_13B), STEP_S, 0.0, 1.0).decode(BATCH, CONTEXT)[0] / OPT_13B.layers


def with_ratio(kind: SharedKind, ratio: float) -> SharedKind:
    """The device with a link at which r = T_T / T_c of OPT-13b is this."""
    return replace(kind, copy_bytes_s=OPT_13B.weight_bytes / OPT_13B.layers / (ratio * layer_s()))


def borders(ratios: Sequence[float]) -> list[dict[str, Any]]:
    """By ratio: most layers by the equations and by the controller without its cap, and steps there and one layer
    beyond, as multiples of a step that waits for nothing."""
    found, layers, each_s = [], OPT_13B.layers, layer_s()
    for ratio in ratios:
        one = max((a for a in range(1, layers) if ratio * (a + 1) <= layers - a - 1), default=0)
        two = max((a for a in range(1, layers - 1) if ratio * (a + 2) <= layers), default=0)
        pace = Pace()
        pace.expect_decodes(dict.fromkeys((1, BATCH), layers * each_s))
        lending = Lending(layers, 1, ratio * each_s, 1.0, layers - 1, pace)
        most = lending.active_most(BATCH, 0.0)
        found.append(
            {
                "ratio": ratio,
                "one_slot_most": one,
                "two_slots_most": two,
                "controller_most": most,
                "step": round(_step(layers, most, ratio, lending), 3),
                "step_beyond": round(_step(layers, most + 1, ratio, lending), 3),
            }
        )
    return found


def _step(layers: int, lent: int, ratio: float, lending: Lending) -> float:
    slots = lending.slots_for(lent, BATCH) or (2 if lent + 2 <= layers else 1)
    return periodic_step_s(layers, circulating(layers, lent, slots), slots, 1.0, ratio) / layers if lent else 1.0


def crossing() -> list[dict[str, Any]]:
    """Layers of OPT-13b that may be lent, by batch of 256 tokens each and by link, without a cap."""
    rows = []
    for of in (GH200, H100):
        kind = device({OPT_13B: C1[OPT_13B]}, of)
        model = kind.models[0]
        for batch in (1, 8, 32, 64, 128, 256):
            pace = Pace()
            seed(pace, model.kind.costs)
            step_s = model.kind.costs.decode(batch, 256.0 * batch)[0]
            pace.expect_decodes({1: step_s, batch + 1: step_s})
            lending = Lending(model.layers, 1, kind.transfer_s(model), 1.0, model.layers - 1, pace)
            rows.append(
                {
                    "device": of.name,
                    "link_gb_s": LINKS[of.name.split("-")[0]] / 1e9,
                    "batch": batch,
                    "step_ms": round(1000 * step_s, 2),
                    "copies_ms": round(1000 * kind.transfer_s(model) * model.layers, 2),
                    "layers": lending.active_most(batch, 0.0),
                }
            )
    return rows


def example() -> dict[str, Any]:
    """An H100 with two models of 26 GB: KV of the device, and with a third of the weights."""
    weights = 2 * OPT_13B.weight_bytes
    kv = H100.memory_bytes * 0.9 - weights - ACTIVATION_BYTES
    return {
        "weights_gb": round(weights / 1e9, 1),
        "kv_gb": round(kv / 1e9, 1),
        "batch_times": round((kv + weights / 3) / kv, 2),
    }


def reversion(kind: SharedKind) -> dict[str, Any]:
    """A burst of Alpaca-like requests, then one long answer: when the last layer is back, after the burst's last
    end."""
    name = kind.models[0].name
    burst = [ModelRequest(0.01 * n, name, 20, 100) for n in range(300)]
    asked = [*burst, ModelRequest(10.0, name, 20, 700)]
    back_s, most = [0.0], [0]

    def look(fleet: SharedFleet) -> None:
        residency = fleet.devices["device-0"].residency
        assert residency is not None
        lending = residency.models[name].lending
        assert lending is not None
        most[0] = max(most[0], lending.lent)
        if lending.lent:
            back_s[0] = fleet.events.now

    found = simulate_many(ManyRun(kind, 1, "prism", lead_s=0.0, remap_cap=CAP), asked, look)
    over_s = max(a.end_s for a in found.answers[:-1])
    return {"arm": "reversion", "layers": most[0], "back_s": round(back_s[0] - over_s, 2)}
