"""What bench/peers claims follows from its curves: where recomputing saturates, users at equal TPOT, and the best peer
at each load."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench" / "peers"))

from claims import E2E, RATE, TPOT, TTFT, against_peers, against_recompute, saturation, users_at, users_at_equal_tpot
from tables import markdown


def document(**targets: dict[int, tuple[float, float, float]]) -> dict[str, Any]:
    """targets: by name and users, (end to end, TPOT, requests a second)."""
    loads = sorted({users for curve in targets.values() for users in curve})

    def point(e2e: float, tpot: float, rate: float) -> dict[str, Any]:
        named = {E2E: e2e, TTFT: e2e / 2, TPOT: tpot, RATE: rate}
        return {"summary": {name: {"median": value} for name, value in named.items()}}

    return {
        "points": [{"label": f"{users} users", "users": users} for users in loads],
        "targets": {
            name: {"points": {f"{u} users": point(*v) for u, v in curve.items()}} for name, curve in targets.items()
        },
    }


OURS = {2: (0.5, 0.02, 1.0), 4: (0.6, 0.03, 2.0), 8: (0.7, 0.04, 4.0), 16: (1.0, 0.06, 7.0), 32: (2.0, 0.10, 9.0)}
RECOMPUTE = {2: (1.0, 0.04, 0.9), 4: (2.0, 0.08, 1.6), 8: (5.0, 0.15, 1.7)}


def test_recompute_saturates_where_more_users_bring_no_more_requests() -> None:
    assert saturation(document(recompute=RECOMPUTE), "recompute") == 4
    assert saturation(document(upbeat=OURS), "recompute") is None


def test_latency_is_judged_where_recompute_saturates_and_users_where_they_are_most() -> None:
    latency, users = against_recompute(document(upbeat=OURS, recompute=RECOMPUTE))
    assert latency.met and "3.33 x" in latency.found
    assert users.met and users.found.startswith("24 (6.0 x)")


def test_recomputing_in_another_engine_is_judged_where_that_saturates() -> None:
    both = document(upbeat=OURS, recompute=RECOMPUTE, **{"vllm-recompute": {2: (1.5, 0.05, 0.9), 4: (5.0, 0.2, 0.9)}})
    _, _, latency, users = against_recompute(both)
    assert latency.text.startswith("2 users, where vllm-recompute saturates") and "3.00 x" in latency.found
    assert users.met and users.found.startswith("at least 32 (8.0 x), beyond the measured range, for its 4")


def test_users_beyond_the_last_load_are_a_lower_bound() -> None:
    short = {users: OURS[users] for users in (2, 4)}
    _, users = against_recompute(document(upbeat=short, recompute=RECOMPUTE))
    assert users.met is None and "beyond the measured range" in users.found and users.line.endswith("not shown")


@pytest.mark.parametrize(
    ("value", "found"), [(0.035, (6.0, False)), (0.01, (None, False)), (0.2, (32.0, True)), (0.06, (16.0, False))]
)
def test_users_at_a_value_lie_on_straight_lines(value: float, found: tuple[float | None, bool]) -> None:
    assert users_at([(u, v[1]) for u, v in OURS.items()], value) == found


def test_ours_is_held_against_the_best_peer_of_each_load_that_was_asked_there() -> None:
    peers = {"vllm": {2: (0.48, 0.03, 1.0), 4: (9.0, 0.2, 1.0)}, "lmcache": {2: (0.47, 0.03, 1.0), 4: (0.5, 0.2, 1.0)}}
    found = {claim.text: claim for claim in against_peers(document(upbeat=OURS, recompute=RECOMPUTE, **peers))}
    assert found[f"2 users, {E2E}"].met is False and "lmcache" in found[f"2 users, {E2E}"].found
    assert found[f"2 users, {TPOT}"].met
    assert not any(text.startswith("8 users") for text in found), "no peer was asked there"


def test_every_other_target_has_its_users_at_equal_tpot() -> None:
    rows = {
        (r["target"], r["users"]): r["ours"] for r in users_at_equal_tpot(document(upbeat=OURS, recompute=RECOMPUTE))
    }
    assert rows == {("recompute", 2): 8.0, ("recompute", 4): 24.0, ("recompute", 8): 32.0}


def test_the_tables_have_every_target_and_say_what_lies_beyond_the_measured_range() -> None:
    peer = {4: (1.0, 0.01, 1.0), 8: (1.0, 0.05, 1.0)}
    lines = markdown(document(upbeat=OURS, recompute=RECOMPUTE, vllm=peer) | {"claims": []}).splitlines()
    equal = lines[next(i for i, line in enumerate(lines) if line.startswith("| Users of `upbeat`")) :]
    assert equal[2] == "| `recompute` | 8 (4.0 x) | 24 (6.0 x) | > 32 (4.0 x) | - | - |"
    assert equal[3] == "| `vllm` | - | - | 12 (1.5 x) | - | - |"
    assert "| `upbeat` | 20 | 30 | 40 | 60 | 100 |" in lines
