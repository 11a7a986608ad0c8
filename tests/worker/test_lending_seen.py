"""Why layers were lent and taken back is remembered, and what a model may lend, or why it lends none, can be asked."""

from __future__ import annotations

import math
import threading
from pathlib import Path

import pytest

from contracts.models import ModelState
from contracts.residency import MOST_MOVES, MayLend, Never, WeightsMove, Why
from tests.worker.engine_harness import tiny_model
from tests.worker.test_models_in_turns import Running, running
from tests.worker.virtual_device import VirtualDevice
from tests.worker.virtual_model import LAYERS
from worker.core.lending import Lending
from worker.core.remap import CALM_S
from worker.core.residency import Residency
from worker.core.resident import SERIES_S, Resident
from worker.service.metrics import WorkerMetrics


def lenders(
    transfer_s: float = 1e-9, prefill_s: float = 1.0, most: int = LAYERS - 1
) -> tuple[VirtualDevice, Resident, Resident]:
    """A device with two idle models, of which the first may lend."""
    device = VirtualDevice(2, 40, weights=2 * LAYERS)
    for model in device.models:
        model.submit(list(range(8)), 1)
    device.go()
    first, second = device.residency.models.values()
    assert first.state is second.state is ModelState.ACTIVE
    first.lending = Lending(LAYERS, 2, transfer_s, prefill_s, most, first.core.pace)
    return device, first, second


def moved(resident: Resident) -> list[tuple[Why, str, int]]:
    """Moves of layers."""
    return [(m.why, m.other, m.layers_lent) for m in resident.moves if m.why in (Why.LENT, Why.CALM, Why.SLOW)]


def test_for_whose_kv_layers_were_lent_and_why_they_came_back() -> None:
    device, first, second = lenders()
    residency, now = device.residency, device.world.now()
    for _ in range(2):
        residency.remap.round(now)
        assert residency.remap.lend(second.share, 1, now)
    assert first.layers_lent == 2 and moved(first) == [(Why.LENT, "m1", 2)], "one after another is one move"
    assert first.moves[-1].state is ModelState.ACTIVE
    now += CALM_S + 0.001
    residency.remap.round(now)
    assert moved(first) == [(Why.LENT, "m1", 2), (Why.CALM, "", 1)] and moved(second) == []


def test_a_model_that_lends_to_itself_and_becomes_slow() -> None:
    device, first, _ = lenders()
    model, lending, remap = device.models[0], first.lending, device.residency.remap
    model.submit(list(range(8)), 50)
    device.go(until=lambda: bool(first.yielding.on_device))
    now = device.world.now()
    remap.round(now)
    assert lending is not None and remap.lend(first.share, 1, now)
    expected_s = lending.layer_s(1) * LAYERS
    for _ in range(30):
        lending.stepped(2 * expected_s, 0, 1, 1)
    remap.round(now)
    assert moved(first) == [(Why.LENT, "m0", 1), (Why.SLOW, "", 0)]


def test_a_model_that_leaves_lends_no_more() -> None:
    device, first, second = lenders()
    device.residency.remap.round(0.0)
    assert first.lending is not None and device.residency.remap.lend(second.share, 1, 0.0)
    device.residency._unload(first, Why.FOR_KV)
    left = first.moves[-1]
    assert (left.state, left.why, left.layers_lent, first.layers_lent) == (ModelState.COLD, Why.FOR_KV, 0, 0)
    assert (first.lending.lendings, first.lending.returns) == (1, 1)


def test_layers_that_go_one_after_another_are_one_move_and_moves_stay_few() -> None:
    _, resident, _ = lenders()
    resident.moves, at_s = (), 5.0

    def lend(other: str, lent: int) -> None:
        resident.note(WeightsMove(at_s, ModelState.ACTIVE, Why.LENT, other, layers_lent=lent))

    for lent in (1, 2, 3):
        lend("a", lent)
        at_s += SERIES_S
    lend("b", 4)
    (series, other) = resident.moves
    assert (series.at_s, series.seconds, series.layers_lent) == (5.0 + 2 * SERIES_S, 2 * SERIES_S, 3)
    assert (other.other, other.seconds) == ("b", 0.0)
    at_s += SERIES_S + 1.0
    lend("b", 5)
    assert len(resident.moves) == 3, "much later it is another move"
    for number in range(100):
        lend(f"m{number}", number)
    assert len(resident.moves) == MOST_MOVES and resident.moves[-1].layers_lent == 99


def test_what_a_model_may_lend_follows_from_the_times_of_a_copy_and_of_a_layer() -> None:
    _, slow, _ = lenders(transfer_s=0.3, prefill_s=0.7)
    told = slow.may_lend(1, 0.0)
    assert told is not None and (told.idle, told.computing, told.never) == (2, 0, None)
    assert told.transfer_s == 0.3 > told.layer_s == slow.core.pace.decode_s(1) / LAYERS > 0
    _, fast, other = lenders(most=2)
    told = fast.may_lend(1, 0.0)
    assert told is not None and (told.idle, told.computing) == (2, 1), "while it computes, copies hide behind layers"
    fast.pinned = True
    told = fast.may_lend(1, 0.0)
    assert told is not None and told.never is Never.PINNED
    assert other.may_lend(1, 0.0) is None, "worker.remap is off"
    other.never = Never.SIZES
    assert other.may_lend(1, 0.0) == MayLend(never=Never.SIZES)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


def samples(r: Running) -> dict[str, float]:
    """Of the model that is here."""
    engines = [serving.engine for serving in r.served.servings]
    found = WorkerMetrics(engines, dict, r.residency, r.placing.circulations).collect()
    return {
        ".".join(
            [s.name.removeprefix("upbeat_worker_"), *(s.labels[key] for key in s.labels if key != "model")]
        ): s.value
        for family in found
        for s in family.samples
        if "layer" in s.name and s.labels["model"] == "two"
    }


def test_a_device_counts_layers_that_are_lent_and_copied(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lends, tick = threading.Event(), Residency.tick

    def tick_and_lend(residency: Residency, now: float) -> None:
        tick(residency, now)
        if lends.is_set():
            lends.clear()
            residency.remap._change(residency.models["two"], 1, 1, now, Why.LENT, "one")

    monkeypatch.setattr(Residency, "tick", tick_and_lend)
    with running(directory, tmp_path, remap="auto", remap_cap=1.0) as r:
        said = r.ask("two")
        resident = r.residency.models["two"]
        assert resident.lending is not None and resident.state is ModelState.ACTIVE
        assert set(samples(r).values()) == {0}
        told = resident.may_lend(1, 0.0)
        assert told is not None and told.transfer_s > 0 and told.layer_s > 0 and told.never is None
        resident.lending.transfer_s, r.residency.remap.lacked_s = 0.0, math.inf
        lends.set()
        r.until(lambda: "two" in r.placing.circulations)
        assert r.ask("two") == said
        found = samples(r)
        assert found["layers_lent"] == found["layers_moved_total.lent"] == 1 and found["layers_moved_total.back"] == 0
        assert found["layer_copies_total"] > 1 and found["layer_copy_seconds_total"] > 0
        assert found["layer_wait_seconds_total"] >= 0


@pytest.mark.parametrize(
    ("settings", "never"),
    [
        ({"remap": "off"}, Never.OFF),
        ({"remap": "auto", "remap_cap": 0.1}, Never.CAP),
        ({"remap": "auto", "shm_dir": "nowhere"}, Never.NO_IMAGE),
    ],
)
def test_why_a_model_lends_nothing(directory: Path, tmp_path: Path, settings: dict[str, object], never: Never) -> None:
    if "shm_dir" in settings:
        (tmp_path / "nowhere").touch()
        settings = settings | {"shm_dir": tmp_path / "nowhere" / "below"}
    with running(directory, tmp_path, **settings) as r:  # type: ignore[arg-type]
        for resident in r.residency.models.values():
            assert (resident.lending, resident.never) == (None, never)
        assert not samples(r)
