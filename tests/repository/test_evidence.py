"""Every result says which code it measured, a document never calls one current whose code has changed, and every claim
of docs/evidence.md follows from a result."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import claimed
import evidence
import intervals
import measured
import rerun
import write_figures
from claim import Claim

from loadtest.report import provenance
from loadtest.sources import changed, digests, in_commit, in_work_tree, is_source

ROOT = measured.ROOT
LEDGER = json.loads(measured.LEDGER.read_text())
CLAIMS = claimed.claims()


@pytest.mark.parametrize("path", measured.results())
def test_a_result_says_when_on_which_machine_and_on_which_code_it_was_measured(path: str) -> None:
    document = json.loads((ROOT / path).read_text())
    assert document.get("sources") or path in LEDGER, "no digests of its code: run bench/measured.py"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", measured.date_of(document))
    parts = {part for part in measured.parts_of(path) if not part.startswith("bench/")}
    assert parts <= set(document.get("sources") or LEDGER[path]["sources"]), "bench/measured.py: MEASURES"
    by_hand = document.get("transcribed") or "stretches" in document
    assert by_hand or measured.measurement(path, document).machine


def test_the_ledger_has_only_results_that_say_nothing_themselves() -> None:
    assert set(LEDGER) <= set(measured.results())
    for path in LEDGER:
        assert not json.loads((ROOT / path).read_text()).get("sources"), f"{path} says it itself: run bench/measured.py"


@pytest.mark.parametrize("path", ["bench/vllm/result-trace.json", "bench/pressure/result-real.json"])
def test_a_digest_of_the_ledger_is_the_commits(path: str) -> None:
    commit = LEDGER[path]["commit"].split()[0]
    blobs = in_commit(ROOT, commit)
    if blobs is None:
        pytest.skip(f"this checkout does not have the commit {commit}")
    assert digests(blobs, measured.parts_of(path)) == LEDGER[path]["sources"]


def test_every_bench_with_a_result_says_what_it_measures() -> None:
    benches = {path.split("/")[1] for path in measured.results()}
    assert benches <= set(measured.MEASURES)
    for bench in (name.split("/")[0] for name in measured.MEASURES):
        assert (ROOT / "bench" / bench).is_dir(), bench


def test_a_changed_added_or_removed_source_makes_a_result_older(tmp_path: Path) -> None:
    (tmp_path / "worker" / "core").mkdir(parents=True)
    source = tmp_path / "worker" / "core" / "plan.py"
    source.write_text("a = 1\n")
    (tmp_path / "worker" / "README.md").write_text("text\n")

    def now() -> dict[str, str]:
        return digests(in_work_tree(tmp_path, ["worker"]), ["worker"])

    then = now()
    (tmp_path / "worker" / "README.md").write_text("other text\n")
    assert changed(then, now(), ["worker"]) == [], "a text is no source"
    source.write_text("a = 2\n")
    assert changed(then, now(), ["worker"]) == ["worker"]
    source.write_text("a = 1\n")
    (tmp_path / "worker" / "more.cpp").write_text("")
    assert changed(then, now(), ["worker"]) == ["worker"]
    source.rename(source.with_name("plans.py"))
    (tmp_path / "worker" / "more.cpp").unlink()
    assert changed(then, now(), ["worker"]) == ["worker"]
    assert changed({}, now(), ["worker"]) == ["worker"], "of nothing known"


def test_a_work_tree_has_git_s_own_blob_ids(tmp_path: Path) -> None:
    (tmp_path / "loadtest").mkdir()
    path = tmp_path / "loadtest" / "x.py"
    path.write_bytes("größe = 1\n".encode())
    (mine,) = in_work_tree(tmp_path, ["loadtest/*"]).values()
    said = subprocess.run(["git", "hash-object", path], capture_output=True, text=True, check=True)
    assert mine == said.stdout.strip()


def test_results_and_what_only_tells_them_are_no_sources() -> None:
    assert is_source("bench/peers/run") and is_source("worker/kernels/attention.cpp")
    for path in ("bench/peers/report.py", "bench/peers/result.json", "worker/tests/x.py", "README.md"):
        assert not is_source(path)


def test_a_new_result_has_commit_and_digests_of_every_part() -> None:
    document = provenance()
    assert set(document["sources"]) >= {p for of in measured.MEASURES.values() for p in of}
    assert document["commit"] or not (ROOT / ".git").exists()
    path = "bench/engine/result.json"
    now = document["sources"] | {"bench/engine": measured._now(ROOT)["bench/engine"]}
    assert measured.measurement(path, {"date": "2026-01-01", "commit": "a" * 12, "sources": now}).current


def test_a_readme_that_calls_an_older_result_current_is_wrong() -> None:
    readme = ROOT / "bench" / "engine" / "README.md"
    text, marked = readme.read_text(), write_figures.told(readme)
    assert marked is not None and "its code has changed since" in text
    fresh = re.sub(r"its code\s+has\s+changed\s+since", "its code is unchanged", text)
    declared = json.loads(write_figures.DECLARED.read_text())["bench/engine/README.md"]
    (said,) = write_figures.complaints(readme, fresh, marked, declared)
    assert "is not what its JSON says" in said


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: f"{claim.result}: {claim.says[:30]}")
def test_a_claim_has_a_figure_a_bound_and_a_command_that_measures_it(claim: Claim) -> None:
    of, _ = evidence.figure(claim)
    assert of.low <= of.value <= of.high and re.match(r"\d", of.samples)
    program = ROOT / claim.command.split()[0]
    assert program.exists() and '"--out"' in program.read_text()
    flags = re.findall(r"--[a-z-]+", claim.command)
    assert all(f'"{flag}"' in program.read_text() for flag in flags)


def test_the_picture_is_drawn_from_the_results() -> None:
    assert evidence.PICTURE.read_text() == evidence.draw(), "run `make figures`"
    ET.fromstring(evidence.draw())


def test_an_interval_decides_only_if_it_is_whole_on_one_side() -> None:
    few = intervals.of_ratios([0.5, 0.6, 0.5, 0.6], "repeats")
    assert (few.low, few.high, few.decides) == (0.5, 0.6, False) and intervals.holds(few, 1.0, below=True) is None
    many = intervals.of_ratios([0.5, 0.6, 0.5, 0.6, 0.55], "repeats")
    assert intervals.holds(many, 1.0, below=True) and intervals.holds(many, 1.0, below=False) is False
    assert intervals.holds(intervals.of_ratios([0.5, 2.0, 0.6, 1.8, 1.0], "repeats"), 1.0, below=True) is None
    alike = intervals.of_medians([2.0] * 5, [1.0] * 5, "x")
    assert (alike.value, alike.low, alike.high) == (2.0, 2.0, 2.0)


def test_all_of_a_few_answers_do_not_show_all() -> None:
    of = intervals.of_share(30, 30, "answers")
    assert of.value == 1.0 and 0.88 < of.low < 0.89 and of.high == 1.0
    assert intervals.holds(of, 0.99, below=False) is None


def test_measuring_again_takes_what_fits_and_says_what_it_leaves_out() -> None:
    todo = {job.result: job for job in rerun.jobs(CLAIMS, 20.0, "", {"make vllm": "no vLLM"})}
    runs = [job for job in todo.values() if not job.left_out]
    assert runs and sum(job.minutes for job in runs) <= 20
    assert "no vLLM" in todo["engine/result.json"].left_out and "are left" in todo["pressure/result.json"].left_out
    assert len({claim for job in todo.values() for claim in job.claims}) == len(CLAIMS)
    assert {job.result for job in rerun.jobs(CLAIMS, 60.0, "needle", {})} == {"needle_ladder/result.json"}


def test_a_figure_measured_again_is_judged_by_both_intervals() -> None:
    claim = next(claim for claim in CLAIMS if claim.bound == 1.0 and claim.below)
    near, far, other = (intervals.Estimate(v, v - 0.05, v + 0.05, "5 x", True) for v in (0.5, 1.5, 0.7))
    assert rerun.judged(claim, near, near) == "repeated" and rerun.judged(claim, near, far) == "CONTRADICTED"
    assert rerun.judged(claim, near, other) == "other figure, same verdict"
