"""Fits in a profile: they come back as they were written, and what is impossible is refused by name."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import pytest

from contracts.corun import Corun, CorunFit, Errors, Pair, Solo, StepFit, corun_from
from contracts.errors import ConfigError
from contracts.latency_profile import decode, encode
from tests.contracts.test_latency_profile import PROFILE

STEP = StepFit(0.001, 0.01, 1e-6, ((8.0, 0.002), (16.0, 0.003)))
FIT = CorunFit(
    2,
    (Solo(1, STEP, 1e-3), Solo(2, STEP.times(0.5))),
    Corun(0.9, -0.1),
    (Pair(1, 1, STEP.times(1.2), 300.0),),
    Errors(0.01, 0.05),
    None,
    64,
)


def test_a_step_is_equation_2_up_to_its_first_bend_and_goes_on_with_the_last() -> None:
    assert STEP.seconds(4, 1000) == pytest.approx(0.01 + 0.004 + 0.001)
    assert STEP.seconds(12, 0) == pytest.approx(0.01 + 0.008 + 4 * 0.002)
    assert STEP.seconds(32, 0) == pytest.approx(0.01 + 0.008 + 8 * 0.002 + 16 * 0.003)
    assert STEP.times(2).seconds(12, 500) == pytest.approx(2 * STEP.seconds(12, 500))


@pytest.mark.parametrize("fit", [FIT, replace(FIT, pairs=(Pair(1, 1),), solo_errors=None), None])
def test_a_profile_with_and_without_them_comes_back_as_it_was_written(fit: CorunFit | None) -> None:
    profile = replace(PROFILE, corun=fit)
    assert decode(encode(profile), "here") == profile


def test_a_profile_of_the_first_format_is_read_and_has_none() -> None:
    data = json.loads(encode(PROFILE))
    data["format"] = 1
    del data["corun"]
    assert decode(json.dumps(data), "old") == PROFILE


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda d: d.pop("solo"), "solo"),
        (lambda d: d.update(shares=0), "shares = 0"),
        (lambda d: d.update(shares=3), "up to all 3"),
        (lambda d: d["solo"].reverse(), "ascend by share"),
        (lambda d: d["solo"][0].update(prefill_token_s=-1.0), "prefill_token_s"),
        (lambda d: d["solo"][0]["step"].update(c0_s=-1.0), "c0_s"),
        (lambda d: d["solo"][0]["step"].update(b0_s="fast"), "b0_s"),
        (lambda d: d["solo"][0]["step"].update(bends=[[8, 0.1], [8, 0.2]]), "ascend by batch"),
        (lambda d: d["corun"].update(k1=True), "k1"),
        (lambda d: d["pairs"][0].update(training=2), r"1 \+ 2 of 2"),
        (lambda d: d["pairs"][0].update(infer=1.0), "infer = 1.0"),
        (lambda d: d["pairs"].append(d["pairs"][0]), "twice"),
        (lambda d: d["solo_errors"].update(worst=None), "worst"),
        (lambda d: d.update(unit_rows=-1), "unit_rows"),
        (lambda d: d.update(surprise=1), "surprise"),
    ],
)
def test_what_is_impossible_is_refused_by_name_and_with_the_profiles_remedy(change: Any, named: str) -> None:
    data = json.loads(json.dumps(asdict(FIT)))
    assert corun_from(data) == FIT
    whole = json.loads(encode(PROFILE)) | {"corun": data}
    change(data)
    with pytest.raises(ConfigError, match=named) as caught:
        decode(json.dumps(whole), "model/profile.json")
    assert "upbeat profile" in str(caught.value)
