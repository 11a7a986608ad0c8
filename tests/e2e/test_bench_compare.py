"""`upbeat bench compare` on stacks of our own: they come and go in turns, and what is kept saves work."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from loadtest.generate_trace import generate, write

pytestmark = [pytest.mark.stack, pytest.mark.slow, pytest.mark.sample, pytest.mark.timeout(280)]
MODEL = Path(os.environ.get("UPBEAT_TEST_MODEL", Path(__file__).parents[2] / "models" / "demo"))


def test_two_policies_are_compared_in_turns_and_the_report_has_both(tmp_path: Path) -> None:
    write(tmp_path / "trace.jsonl", generate(40, seed=2, mean_prompt_tokens=6000))
    files = []
    for policy in ("balanced", "recompute"):
        files.append(tmp_path / f"{policy}.yaml")
        files[-1].write_text(
            yaml.safe_dump({"upbeat": {"policy": policy, "model": str(MODEL), "hbm_gib": 0.25, "dram_gib": 0.25}})
        )
    load = {
        "trace": "trace.jsonl",
        "min_turns": 3,
        "loop": "closed",
        "users": [2, 3],
        "seconds": 6,
        "time_scales": [0.03],
        "max_context_tokens": 1500,
        "max_answer_tokens": 8,
        "model_directory": str(MODEL),
        "hints": {"late": 0.2, "spurious": 0.2},
        "urgent": 0.2,
        "slo": {"ttft_s": 30},
    }
    (tmp_path / "load.yaml").write_text(yaml.safe_dump(load))
    command = [
        str(Path(sys.executable).with_name("upbeat")),
        "bench",
        "compare",
        *map(str, files),
        "--workload",
        str(tmp_path / "load.yaml"),
    ]
    command += ["--out", str(tmp_path / "out.json"), "--html", str(tmp_path / "out.html")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads((tmp_path / "out.json").read_text())
    assert [p["label"] for p in document["points"]] == ["2 users", "3 users"]
    for label in ("2 users", "3 users"):
        (kept,), (computed,) = (
            document["targets"][name]["points"][label]["runs"] for name in ("balanced", "recompute")
        )
        assert kept["failed"] == computed["failed"] == 0 and kept["slo_attainment"] == 1.0
        assert kept["cached_share_returning"] > 0.5 and computed["cached_share_returning"] == 0.0
        assert kept["hints"]["accepted"] > 0 and computed["hints"]["sent"] == 0
        assert {o["node"] for o in kept["outcomes"]} == {"node-0", "node-1"}
    page = (tmp_path / "out.html").read_text()
    assert "balanced" in page and "recompute" in page and page.count("<svg") >= 8
