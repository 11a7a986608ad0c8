"""`upbeat autoscale` prints a gateway's recommendation."""

from __future__ import annotations

import io

from rich.console import Console

from cli.autoscale import show
from contracts.v1 import scheduler_pb2 as pb
from gateway.routes.scale import scale_page


def shown(said: pb.ScaleReply) -> str:
    page = io.StringIO()
    show(Console(file=page, width=100, highlight=False, markup=False), scale_page(said))
    return page.getvalue()


def test_the_number_its_reason_and_the_signals_are_shown() -> None:
    models = {"m": pb.ModelScale(work_s=9.0, arriving=1.5, nodes=2, attainment={"ttft": 0.5}, turns={"ttft": 8})}
    text = shown(
        pb.ScaleReply(
            desired_nodes=3,
            why="work",
            nodes=2,
            starting_nodes=1,
            utilisation=0.9,
            hbm_needed=0.4,
            dram_needed=1.2,
            attainment=0.5,
            turns=8,
            models=models,
            min_nodes=1,
            max_nodes=8,
            target_utilisation=0.6,
        )
    )
    lines = text.splitlines()
    assert lines[0] == "3 nodes wanted (work); 2 serve, 1 starting"
    assert "utilisation 90% (target 60%), KV needed: HBM 40%, DRAM 120%, SLO kept: 50.0% of 8" in text
    assert lines[-1].split() == ["m", "2", "4.50", "s", "1.50", "s", "50.0%", "-"]


def test_a_fleet_without_targets_or_with_missing_reports_says_so() -> None:
    text = shown(pb.ScaleReply(desired_nodes=2, nodes=2, incomplete="no report from node-0"))
    assert "nothing is changed: no report from node-0" in text and "utilisation -" in text and "SLO kept: -" in text
