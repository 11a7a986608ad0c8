"""`upbeat profile --corun`: steps alone and beside a real trainer, of a tiny model."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from runtime.config_file import load_config
from tests.worker.engine_harness import CHUNK, tiny_model
from worker.measure import make_profile
from worker.measure.corun import CorunGrid

GRID = CorunGrid((1, 4), (32, 96), ((2, 64),), (256,), visits=2, most=2000, limit_s=0.25)


@pytest.mark.slow
@pytest.mark.sample
def test_each_point_is_visited_in_a_drawn_order_with_every_split_and_fitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {
        "model": str(tiny_model(tmp_path / "tiny")), "data": tmp_path / "data", "run_dir": tmp_path / "run",
        "shm_dir": tmp_path / "shm", "kv": {"hbm_gib": 0.25, "cache": False, "chunk_tokens": CHUNK},
        "worker": {"device": "cpu", "kernels": "native", "threads": 2},
    }  # fmt: skip
    monkeypatch.setattr(make_profile, "QUICK_CORUN", GRID)
    torch.set_grad_enabled(False)
    said = list[str]()
    found = asyncio.run(
        make_profile.measure(load_config(None, settings), quick=True, corun=True, say=said.append)
    ).corun
    assert found is not None and found.shares == 2
    assert [(solo.share, solo.prefill_token_s > 0) for solo in found.solo] == [(1, True), (2, True)]
    [pair] = found.pairs
    assert (pair.infer, pair.training) == (1, 1) and pair.trained_tokens_s > 0
    assert found.solo_errors is not None and found.corun_errors is not None
    assert found.solo[0].step.seconds(4, 400) > 0
    visits = [line.split(",")[0] for line in said if line.startswith("corun")]
    assert visits == ["corun 1/2"] * 6 + ["corun 2/2"] * 6
    points = [line.split(": ")[0].removeprefix(visit) for line, visit in zip(said[-12:], visits, strict=True)]
    assert sorted(points[:6]) == sorted(points[6:]) and points[:6] != points[6:]
