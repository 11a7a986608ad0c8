"""bench/harli: loads and memory are what they are said to be, each system differs in what its name says, and the
figures' headline holds on a short trace."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import pytest

from bench.harli.arms import harvesting, run, trained_alone
from bench.harli.devices import GPUS, PAIRS, Pair
from bench.harli.figures import Bench, figure_9, figure_10
from bench.harli.loads import SetBatch, requests_of
from bench.harli.over_time import controlled
from bench.harli.profiling import measured, splits
from loadtest.simulate.events import Events
from loadtest.simulate.request import Request
from worker.core.harvest import Harvest, Split

PAIR = Pair("Ada6000", "Llama", "Llama")


def test_generated_requests_have_the_rate_and_lengths_of_the_conversation_trace() -> None:
    made = requests_of(None, 1200.0, 1)
    assert len(made) / 1200 == pytest.approx(5.5, rel=0.1)
    assert fmean(r.input_tokens for r in made) == pytest.approx(1100, rel=0.15)
    assert fmean(r.output_tokens for r in made) == pytest.approx(200, rel=0.15)
    times = [r.arrival_s for r in made]
    assert times == sorted(times) and made == requests_of(None, 1200.0, 1) != requests_of(None, 1200.0, 2)


def test_a_trace_is_read_for_so_long(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    rows = [f"2023-11-16 18:15:{second:02}.0000000,100,10" for second in range(10, 50)]
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(rows) + "\n")
    assert len(requests_of(path, 20.0, 1)) == 20


def test_a_set_batch_keeps_so_many_running_in_each_phase() -> None:
    events, sent = Events(), list[Request]()
    SetBatch(events, sent.append, [(3, 10.0), (5, 10.0), (2, 10.0)])
    events.run(lambda: False, limit_s=0.0)
    assert len(sent) == 3
    sent[0].done(sent[0])
    events.run(lambda: False, limit_s=10.0)
    assert len(sent) == 6, "one follows, two more are wanted"
    for request in sent[:4]:
        request.done(request)
    events.run(lambda: False, limit_s=19.0)
    assert len(sent) == 10
    events.run(lambda: False, limit_s=20.0)
    sent[5].done(sent[5])
    events.run(lambda: False, limit_s=30.0)
    assert len(sent) == 10, "more are running than wanted"


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("models", PAIRS)
def test_every_pair_fits_its_gpu_with_training_in_each_system(gpu: str, models: tuple[str, str]) -> None:
    pair = Pair(gpu, *models)
    two_layers = 2 * pair.work.layer_bytes
    assert pair.kind.kv_bytes > two_layers
    assert pair.kind.kv_bytes == pytest.approx(pair.serving.kv_bytes - pair.work.fixed_bytes)
    static = Pair(gpu, *models, part=0.6)
    assert static.static_layers_bytes > two_layers and static.kind.kv_bytes > 4e9
    whole = Pair(gpu, *models, devices=2)
    assert whole.kind.kv_bytes > pair.kind.kv_bytes, "half of the weights"


def test_a_gpu_whose_sms_read_less_is_that_gpu_otherwise() -> None:
    made = Pair("A100", "Llama", "Qwen", steep=0.8).shared
    assert made.steep == 0.8 and made.device == GPUS["A100"].device
    assert made.reached(0.1) < GPUS["A100"].reached(0.1)


def test_the_paper_s_45_splits_are_measured_and_each_share_alone() -> None:
    assert len(splits(10)) == 45
    seen = {(m.infer, m.training) for m in measured(PAIR, 1)}
    assert seen == set(splits(10)) | {Split(share, 0) for share in range(1, 11)}


def test_production_decides_and_its_profile_has_training_s_speed_only_for_our_rule() -> None:
    for rates in (False, True):
        harvest, fit = harvesting(PAIR, 1, rates)
        assert type(harvest) is Harvest
        assert all((pair.trained_tokens_s > 0) is rates for pair in fit.pairs)


def test_training_beside_serving_is_quicker_than_apart_and_tokens_are_in_time() -> None:
    requests = requests_of(None, 12.0, 1)
    rows = {arm: run(PAIR, arm, requests, 1) for arm in ("separate", "static", "harli", "harvest", "harli-tp")}
    assert rows["separate"]["trained_tokens_s"] == pytest.approx(trained_alone(PAIR, 1), rel=0.01)
    assert rows["static"]["trained_tokens_s"] < rows["separate"]["trained_tokens_s"]
    for arm in ("harli", "harvest"):
        assert rows[arm]["trained_tokens_s"] > 1.3 * rows["separate"]["trained_tokens_s"]
        assert rows[arm]["in_time"] >= 0.98 and rows[arm]["errors"]["mean"] < 0.06
    assert rows["separate"]["requests"] == len(requests) == rows["harli-tp"]["requests"]
    assert rows["harli"]["requests"] == rows["static"]["requests"] == -(-len(requests) // 2)


def test_more_memory_for_kv_is_less_for_layers() -> None:
    light, heavy, medium = controlled(Pair("A100", "Llama", "Llama"), True, 1)["loads"]
    assert light["window"] > heavy["window"] and light["kv_gb"] < heavy["kv_gb"]
    assert medium["running"] < heavy["running"] and light["late"] <= 0.01


def test_curves_are_sublinear_in_shares_and_grow_beside_training() -> None:
    bench = Bench(True, 1, lambda cells: [cell() for cell in cells])
    for row in figure_9(bench)["rows"]:
        assert row["ms"][0] < 5 * row["ms"][-1] and row["ms"] == sorted(row["ms"], reverse=True)
    for row in figure_10(bench)["rows"]:
        assert all(after >= 0.98 * before for before, after in zip(row["ms"], row["ms"][1:], strict=False))
        assert row["ms"][0] >= 0.98 * row["alone_ms"]
