"""bench/many_models gives every arm memory that can serve its requests, and as many requests as the load says."""

from __future__ import annotations

import pytest

from bench.many_models.setting import LONGEST, Setting, planned, token_bytes
from loadtest.random_model import SHAPES, parameters

MIB = 1 << 20


def setting(shape: str = "roomy", models: int = 4, at_once: int = 4) -> Setting:
    return Setting({f"{shape}-{n}": shape for n in range(models)}, at_once, 0.6, 20.0)


def test_memory_is_a_share_of_weights_and_kv() -> None:
    found = setting()
    # 12 layers of 4 MiB and 4 MiB beside them; 24 KiB of KV a token.
    assert found.weight_bytes == 4 * 52 * MIB
    assert token_bytes("roomy") == 24 << 10 and token_bytes("131m") == 12 << 10
    assert found.kv_bytes == 4 * 4 * LONGEST * (24 << 10)
    assert found.hbm_bytes == round(0.6 * (found.weight_bytes + found.kv_bytes))
    found.check()


def test_a_size_that_static_could_not_serve_is_refused() -> None:
    with pytest.raises(ValueError, match="at-once"):
        setting(at_once=2).check()
    with pytest.raises(ValueError, match="131m-0"):
        setting("131m").check()


@pytest.mark.parametrize("per_s", [0.5, 7.0])
def test_each_trace_has_the_load_and_no_longer_requests(per_s: float) -> None:
    for seed in (1, 2, 3):
        requests = setting().requests(per_s, seed, 60.0)
        assert abs(len(requests) - 60 * per_s) <= 1
        assert all(r.input_tokens + r.output_tokens <= LONGEST for r in requests)


def test_the_plan_is_for_the_stacks_models_within_the_time() -> None:
    found = setting()
    requests = found.requests(2.0, 1, 60.0)
    plans = [planned(requests, found.names, salt) for salt in (1, 2)]
    assert len(plans[0]) == len(requests) and {s.model for s in plans[0]} <= set(found.shapes)
    assert all(0 <= turn.arrival_s < 65 for s in plans[0] for turn in s.turns)
    texts = [{turn.text for s in plan for turn in s.turns} for plan in plans]
    assert not texts[0] & texts[1], "a load would find the cache of the one before"


def test_the_deep_shape_has_200_million_parameters() -> None:
    config, _ = SHAPES["200m"]
    assert config["num_hidden_layers"] == 24 and parameters(config) == pytest.approx(200e6, rel=0.02)
