"""What grew between two looks, over restarts too."""

from __future__ import annotations

from cli.core.traffic import Look, sample


def test_a_counter_that_shrank_was_restarted_and_is_new_as_a_whole() -> None:
    look = Look({"a": 3.0, "b": 7.0}, {"a": 5.0, "b": 4.0}, 2.0)
    assert look.gained("a") == 3.0 and look.gained("b") == 3.0 and look.gained("absent") == 0.0
    assert look.rate("b") == 1.5
    assert Look({"b": 7.0}).rate("b") == 0.0


def test_families_are_summed_by_label_and_shared_out() -> None:
    name = "hits_total"
    look = Look(
        {
            sample(name, tier="dram"): 30.0,
            sample(name, tier="ssd"): 10.0,
            "hits_total_other": 99.0,
            sample("x", tier="ssd"): 5.0,
        }
    )
    assert look.gained_in(name) == 40.0 and look.gained_in(name, tier="ssd") == 10.0
    assert look.shares((name,), "tier", ("dram", "ssd", "blob")) == {"dram": 0.75, "ssd": 0.25, "blob": 0.0}
    assert look.shares(("nothing",), "tier", ("dram",)) is None
    assert look.shares((name, "x"), "tier", ("dram", "ssd")) == {"dram": 30 / 45, "ssd": 15 / 45}
