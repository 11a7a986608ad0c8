"""Figures are what the outcomes say, and a table shows them side by side."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from loadtest.client import Hint, Outcome
from loadtest.figures import figures, imbalance, spread
from loadtest.policies import fixed_answers, parse_policies
from loadtest.report import provenance, side_by_side, write_json


def outcome(at_s: float, ttft_s: float, turn: int = 0, node: str = "node-0", **more: object) -> Outcome:
    o = Outcome(
        "s",
        turn,
        at_s,
        sent_s=at_s,
        first_s=at_s + ttft_s,
        end_s=at_s + ttft_s + 1.0,
        node=node,
        output_tokens=11,
        prompt_tokens=100,
    )
    for name, value in more.items():
        setattr(o, name, value)
    return o


def test_a_spread_has_mean_and_percentiles() -> None:
    assert spread(range(1, 101)) == {"count": 100, "mean": 50.5, "p50": 50.5, "p95": 95.05, "p99": 99.01}
    assert spread([]) == {"count": 0}


def test_first_and_returning_turns_are_told_apart_and_failures_are_left_out() -> None:
    shown = figures(
        [
            outcome(0, 2.0, cached_tokens=0),
            outcome(5, 0.5, turn=1, cached_tokens=80),
            outcome(6, 0.7, turn=2, cached_tokens=90),
            outcome(7, 50.0, turn=3, error="boom"),
        ],
        nodes=2,
        window_s=1.0,
    )
    assert (shown["requests"], shown["failed"], shown["errors"]) == (4, 1, ["boom"])
    assert shown["ttft_first_turns_s"]["mean"] == 2.0
    assert shown["ttft_returning_turns_s"]["mean"] == pytest.approx(0.6)
    assert shown["tpot_s"]["mean"] == pytest.approx(0.1)
    assert shown["cached_share"] == pytest.approx(170 / 300, abs=1e-4)
    assert shown["cached_share_returning"] == 0.85


def test_imbalance_is_one_when_even_and_the_number_of_nodes_when_one_has_all() -> None:
    even = imbalance([outcome(0, 1.0, node="node-0"), outcome(0, 1.0, node="node-1")], nodes=2, window_s=10)
    alone = imbalance([outcome(0, 1.0), outcome(1, 1.0)], nodes=4, window_s=10)
    assert (even["requests"], even["outstanding"]) == (1.0, 1.0)
    assert (alone["requests"], alone["outstanding"]) == (4.0, 4.0)
    assert alone["requests_by_node"] == {"node-0": 2}


def test_imbalance_in_windows_shows_what_the_whole_run_hides() -> None:
    first_here_then_there = [outcome(0, 1.0, node="node-0"), outcome(10, 1.0, node="node-1")]
    shown = imbalance(first_here_then_there, nodes=2, window_s=5)
    assert shown["outstanding"] == 2.0
    assert shown["outstanding_whole_run"] == 1.0


def test_hints_are_counted_and_their_lead_is_taken_to_the_request() -> None:
    hinted = outcome(10, 1.0, hint=Hint(sent_s=4.0, answered_s=4.1, status=202))
    late = outcome(20, 1.0, hint=Hint(sent_s=19.9, answered_s=20.5, status=202))
    refused = outcome(30, 1.0, hint=Hint(sent_s=25.0, answered_s=25.1, status=429))
    hints = figures([hinted, late, refused, outcome(40, 1.0)], 2, 1.0)["hints"]
    assert (hints["sent"], hints["accepted"], hints["answered_before_request"]) == (3, 2, 1)
    assert hints["lead_s"]["mean"] == pytest.approx((6.0 + 0.1 + 5.0) / 3)


def test_no_outcome_at_all_still_makes_figures() -> None:
    assert figures([], 2, 0.0)["requests"] == 0


def test_the_table_has_a_column_a_policy_and_the_json_its_origin(tmp_path: Path) -> None:
    shown = {
        name: figures([outcome(0, t), outcome(3, t, turn=1)], 2, 1.0)
        for name, t in (("sticky", 0.5), ("balanced", 0.25))
    }
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(side_by_side(shown, "title"))
    text = console.export_text()
    assert "sticky" in text and "balanced" in text and "0.250" in text and "returning turns: p95" in text
    write_json(tmp_path / "deep" / "r.json", provenance() | {"policies": shown})
    read = json.loads((tmp_path / "deep" / "r.json").read_text())
    assert read["policies"]["balanced"]["ttft_s"]["p50"] == 0.25
    assert {"date", "machine", "versions"} <= set(read) and read["machine"]["cores"] >= 1


def test_policies_are_named_and_an_unknown_one_is_refused() -> None:
    assert [p.name for p in parse_policies("balanced, sticky,balanced")] == ["balanced", "sticky"]
    recompute, sticky, balanced = parse_policies("recompute,sticky,balanced")
    assert (recompute.cache, recompute.placement, recompute.hints) == (False, "balanced", False)
    assert (sticky.cache, sticky.placement, sticky.hints) == (True, "sticky", False)
    assert (balanced.cache, balanced.placement, balanced.hints) == (True, "balanced", True)
    with pytest.raises(ValueError, match="'roundrobin'; there are recompute, sticky, balanced"):
        parse_policies("sticky,roundrobin")
    with pytest.raises(ValueError, match="no policy"):
        parse_policies(" , ")


def test_answers_are_fixed_to_a_word_that_the_tokenizer_has(tmp_path: Path) -> None:
    assert fixed_answers(tmp_path) == {"ignore_eos": True}
    demo = Path(__file__).parents[2] / "models" / "demo"
    (token,) = fixed_answers(demo)["logit_bias"]
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(demo / "tokenizer.json"))
    answer = tokenizer.decode([int(token)] * 5)
    assert (
        tokenizer.encode(f"<|im_start|>assistant\n{answer}<|im_end|>", add_special_tokens=False).ids.count(int(token))
        == 5
    )
