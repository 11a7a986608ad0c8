"""Devices exchange models with the production cores of scheduler and workers, and every request is answered."""

from __future__ import annotations

import pytest

from bench.prism.figures import EIGHT, KINDS, REQUEST_S, Bench
from loadtest.simulate.many import ManyRun, SharedFleet, simulate_many
from loadtest.simulate.presets import H100
from loadtest.simulate.shared_kind import shared_kind


@pytest.mark.slow
def test_two_devices_exchange_models_and_every_request_is_answered() -> None:
    kind = shared_kind(H100, EIGHT, request_s=REQUEST_S)
    trace = [r for r in Bench(False, 1, lambda cells: []).trace(kind, KINDS["chat"], 16.0) if r.time_s < 110.0]
    exchanges: set[tuple[str, ...]] = set()

    def watch(fleet: SharedFleet) -> None:
        plan = fleet.control.model_moves._plan
        if plan is not None and len(plan.rest) > 1:
            exchanges.add(tuple(move.model for move in plan.rest))

    outcome = simulate_many(ManyRun(kind, 2, "prism"), trace, watch)
    moves = outcome.fleet.control.model_moves
    assert exchanges and not moves.given_up and moves.arrived == moves.begun >= 2
    assert all(answer.end_s >= 0 for answer in outcome.answers)
