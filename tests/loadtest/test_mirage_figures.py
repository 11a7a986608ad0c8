"""bench/mirage: loads and devices are what they are said to be, variants differ from production's controller in what
their names say, and the border of lending is that of the paper's equations."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest

from bench.mirage import border
from bench.mirage.arms import ARMS, Even, OneSlot, Swapping, TwoSlots, run, swapping
from bench.mirage.devices import C1, C2, device, instance
from bench.mirage.figures import Bench, figure_ratio
from bench.mirage.loads import ALPACA, SHAREGPT, BadTrace, Stream, arrivals, spatial, temporal
from loadtest.simulate.circulating import periodic_step_s
from loadtest.simulate.many import ModelRequest
from loadtest.simulate.presets import H100, OPT_13B
from worker.core.lending import Lending
from worker.core.pace import Pace

STREAMS = [Stream("a", SHAREGPT, 6.0), Stream("b", ALPACA, 12.0)]


def lending(kind: type[Lending], ratio: float) -> Lending:
    """Of 40 layers that compute in a millisecond each."""
    pace = Pace()
    pace.expect_decodes({1: 0.04, 2: 0.04})
    return kind(40, 10, ratio * 1e-3, 1.0, 39, pace)


def file_of(folder: Path, gaps: list[float]) -> Path:
    lines, at = ["TIMESTAMP,ContextTokens,GeneratedTokens"], 0.0
    for gap in gaps:
        at += gap
        lines.append(f"2023-11-16 18:{int(at // 60):02}:{at % 60:010.7f},10,10")
    path = folder / "trace.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize("seed", [1, 2])
def test_generated_arrivals_have_their_mean_rate_and_come_in_bursts(seed: int) -> None:
    times = arrivals(5.0, 600.0, seed, None)
    assert times == sorted(times) and len(times) == pytest.approx(3000, rel=0.1)
    counts = [sum(begin <= at < begin + 10 for at in times) for begin in range(0, 600, 10)]
    mean = sum(counts) / len(counts)
    spread = (sum((count - mean) ** 2 for count in counts) / len(counts)) ** 0.5
    assert spread > 0.6 * mean, "a Poisson process has 0.14"


def test_a_file_s_arrivals_keep_their_pattern_at_another_rate(tmp_path: Path) -> None:
    path = file_of(tmp_path, [0.1] * 20 + [5.0] + [0.1] * 100)
    times = arrivals(2.0, 20.0, 1, path)
    assert len(times) == 40 and times[0] == 0.0 and times[-1] < 20.0
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert max(gaps) == pytest.approx(50 * min(gaps), rel=0.01)


def test_a_file_that_is_too_short_or_has_no_times_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadTrace, match="has 10 arrivals; a run needs 41"):
        arrivals(2.0, 20.0, 1, file_of(tmp_path, [0.1] * 10))
    (tmp_path / "other.csv").write_text("time,tokens\n1,2\n")
    with pytest.raises(BadTrace, match="has no column TIMESTAMP"):
        arrivals(2.0, 20.0, 1, tmp_path / "other.csv")
    (tmp_path / "words.csv").write_text("TIMESTAMP\nsoon\n")
    with pytest.raises(BadTrace, match="TIMESTAMP is like"):
        arrivals(2.0, 20.0, 1, tmp_path / "words.csv")


def test_models_in_turns_have_requests_in_their_own_turns_only() -> None:
    every, turns = spatial(STREAMS, 100.0, 1, None), temporal(STREAMS, 10.0, 100.0, 1, None)
    assert set(turns) < set(every)
    assert all(asked.model == ("a", "b")[int(asked.time_s / 10) % 2] for asked in turns)
    for stream in STREAMS:
        own = [asked for asked in every if asked.model == stream.model]
        assert len(own) == pytest.approx(100 * stream.rate, rel=0.2)
        mean = sum(asked.output_tokens for asked in own) / len(own)
        assert 0.5 * stream.lengths.output_tokens < mean < 1.2 * stream.lengths.output_tokens, "some are cut off"


@pytest.mark.parametrize("models", [C1, C2], ids=["C1", "C2"])
def test_devices_have_the_parts_of_table_1(models: dict) -> None:  # type: ignore[type-arg]
    kind = device(models)
    assert kind.granules * 2**21 == pytest.approx(sum(models.values()) * 96e9, rel=1e-3)
    assert sum(m.granules + m.fixed_granules for m in kind.models) == pytest.approx(kind.granules, abs=4)
    assert kind.copy_bytes_s == 450e9 and device(models, H100).copy_bytes_s == 50e9


def test_a_strict_instance_has_its_part_of_everything() -> None:
    whole, part = device({OPT_13B: 0.35}), instance(OPT_13B, 0.35, 0.9)
    assert part.granules == whole.granules and part.copy_bytes_s == pytest.approx(whole.copy_bytes_s * 0.35 / 0.9)
    assert part.models[0].kind.costs.decode(8, 1e3)[0] > 1.5 * whole.models[0].kind.costs.decode(8, 1e3)[0]


@pytest.mark.parametrize("ratio", [1.5, 2.0, 3.0, 5.0])
def test_layers_in_two_slots_cost_little_where_the_equations_hold(ratio: float) -> None:
    made = lending(Lending, ratio)
    for lent in range(1, 16):
        if (slots := made.slots_for(lent, 1)) is not None:
            made.lent, made.slots = lent, slots
            assert periodic_step_s(40, made.circulating, slots, 1.0, ratio) <= 1.06 * 40


def test_variants_of_slots_lend_as_much_as_production_s() -> None:
    plain, one, two, even = (lending(kind, 3.0) for kind in (Lending, OneSlot, TwoSlots, Even))
    assert {each.active_most(1, 0.0) for each in (plain, one, two, even)} == {11}
    assert [plain.slots_for(lent, 1) for lent in (3, 11)] == [2, 2]
    assert [even.slots_for(lent, 1) for lent in (3, 11)] == [1, 2]
    assert {one.slots_for(lent, 1) for lent in (3, 11)} == {1} and {two.slots_for(lent, 1) for lent in (3, 11)} == {2}


def test_the_controller_lends_up_to_the_border_of_the_equations_and_refuses_beyond() -> None:
    for row in border.borders((1.0, 2.0, 3.0, 5.0, 12.0)):
        assert row["controller_most"] == max(row["one_slot_most"], row["two_slots_most"])
        assert row["step"] <= 1.03 and (row["step_beyond"] > row["step"] or row["ratio"] == 1.0)
    assert border.borders((3.0,))[0]["one_slot_most"] == 9 and border.borders((3.0,))[0]["two_slots_most"] == 11


def test_a_device_s_link_is_set_by_ratio() -> None:
    kind = border.with_ratio(device({OPT_13B: 0.35}), 5.0)
    step_s = kind.models[0].kind.costs.decode(border.BATCH, border.CONTEXT)[0]
    assert kind.transfer_s(kind.models[0]) / (step_s / 40) == pytest.approx(5.0)


def test_steps_wait_for_swaps_only_beyond_the_device_s_memory() -> None:
    kind = device({OPT_13B: 0.35})
    inner = kind.models[0].kind.costs
    costs = Swapping(inner, tokens=1_000, token_bytes=1e6, bytes_per_s=1e9)
    assert costs.decode(4, 900.0) == inner.decode(4, 900.0)
    assert costs.decode(4, 2_000.0) == (pytest.approx(1.0), 1e-3)
    assert costs.mixed_s(4, 900.0, [(600, 0)]) == pytest.approx(0.5)
    assert swapping(kind).granules > kind.granules


@pytest.mark.slow
@pytest.mark.sample
def test_a_run_of_every_arm_answers_its_requests_and_lends_by_its_own_rule() -> None:
    dice, kind = random.Random(1), device({OPT_13B: 0.35})
    asked = [ModelRequest(0.03 * n, "OPT-13B", dice.randint(50, 300), dice.randint(100, 200)) for n in range(120)]
    rows = {arm: run(kind, arm, asked) for arm in ARMS}
    assert all(row["held"] and row["unfinished"] == 0 for row in rows.values())
    assert {arm for arm, row in rows.items() if row["lendings"]} == {arm for arm, each in ARMS.items() if each.cap}
    assert rows["kept"]["returns"] == rows["uncapped, kept"]["returns"] == 0 < rows["remap"]["returns"]
    assert rows["remap"]["layers_moved"] < rows["even"]["layers_moved"]
    assert rows["remap"]["ttft_p99_s"] < rows["preempt"]["ttft_p99_s"]


def test_a_request_that_never_fits_is_said_to_be_so() -> None:
    row = run(device(C2), "recompute", [ModelRequest(0.0, "OPT-30B", 1_700, 300)])
    assert row["held"] is False and "does not fit" in row["why"]


def test_a_figure_has_a_row_of_each_cell() -> None:
    found = figure_ratio(Bench(True, 1, lambda cells: [cells[-1]()]))
    assert found["rows"][0]["ratio"] == 12.0 and found["rows"][0]["lendings"] == 0
