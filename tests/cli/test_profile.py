"""`upbeat profile` measures with real processes, a worker starts from what it kept, and what is not of this machine is
refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from contracts.latency_profile import decode
from loadtest.random_model import SHAPES, make_random_model
from loadtest.stack import Stack
from runtime.config_file import load_config
from runtime.profile_files import store

pytestmark = [pytest.mark.stack, pytest.mark.timeout(280)]
ROOT = Path(__file__).parents[2]


def upbeat(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from cli.main import app; app()", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=240
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_model(tmp_path_factory.mktemp("profiled"), SHAPES["tiny"][0], 1, "float32")


@pytest.mark.slow
def test_a_profile_is_measured_kept_shown_and_used_and_nothing_else_stays(model: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    done = upbeat("profile", "--quick", "--model", model, "--data", data)
    assert done.returncode == 0, done.stderr
    assert "load from dram" in done.stdout and "tokens/s" in done.stdout and "another node's DRAM" in done.stdout
    [path] = model.glob("upbeat-profile-*.json")
    assert str(path) in done.stdout
    assert not [p for p in data.iterdir() if p.name.startswith("profiling")], "what was measured with is gone"
    profile = decode(path.read_text(), str(path))
    assert set(profile.loads) == {"dram", "ssd", "ssd_cold", "peer"}
    assert (
        profile.decode_s(8, 1000) >= profile.decode_s(1, 100) > 0 and profile.prefill_s(256) > profile.prefill_s(16) > 0
    )
    assert path.stat().st_size < 8192

    shown = upbeat("profile", "--show", "--json", "--model", model, "--data", data)
    assert shown.returncode == 0 and json.loads(shown.stdout) == json.loads(path.read_text())

    with Stack(model=model, nodes=2, hbm_gib=0.05, dram_gib=0.1, directory=tmp_path / "stack") as stack:
        logged = [
            json.loads(line)
            for line in (stack.run_dir / "logs" / "worker-0.log").read_text().splitlines()
            if line.startswith("{")
        ]
    events: dict[str, Any] = {line["event"]: line for line in logged}
    assert events["profile"]["sources"] == sorted(profile.loads)

    elsewhere = replace(profile, subject=replace(profile.subject, device="A processor of another kind"))
    path.unlink()
    store(elsewhere, load_config(None, {"model": model, "data": data}))
    refused = upbeat("profile", "--show", "--model", model, "--data", data)
    assert (
        refused.returncode == 2
        and "A processor of another kind" in refused.stderr
        and "upbeat profile" in refused.stderr
    )


def test_what_cannot_be_measured_is_one_line_that_says_why(model: Path, tmp_path: Path) -> None:
    broken = make_random_model(
        tmp_path / "broken",
        SHAPES["tiny"][0] | {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}},
        1,
        "float32",
    )
    done = upbeat("profile", "--quick", "--model", broken, "--data", tmp_path / "data")
    said = [line for line in done.stderr.strip().splitlines() if "this machine is busy" not in line]
    assert done.returncode == 2 and len(said) == 1 and "longrope" in said[0]
    assert not list(broken.glob("upbeat-profile-*"))
    whole = make_random_model(tmp_path / "whole", SHAPES["tiny"][0], 1, "float32")
    none = upbeat("profile", "--show", "--model", whole, "--data", tmp_path / "data")
    assert none.returncode == 2 and "no profile" in none.stderr
