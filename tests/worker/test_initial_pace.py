"""Which profile a worker takes, what it refuses, and what it does with it before anything has run."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from contracts.errors import ConfigError
from contracts.kv import KvShape
from contracts.latency_profile import LoadRate, Profile, Surface, encode
from runtime.config import Config
from runtime.config_file import load_config
from runtime.profile_files import fitting, store
from worker.core.pace import Pace
from worker.measure.initial_pace import compute_threads, profile_of, seed, subject
from worker.measure.steps import Computed

SHAPE = KvShape.of_heads(b"f" * 32, 4, 2, 16, 64, "bfloat16")
SUBJECT = subject(SHAPE, 2, "native")
STEPS = Surface((1, 512), (0, 2048), ((0.01, 0.03), (0.5, 1.0)))
PROFILE = Profile(
    SUBJECT,
    "m",
    4,
    SHAPE.token_bytes,
    STEPS,
    STEPS,
    STEPS,
    STEPS,
    {"dram": LoadRate(0.001, 1e9)},
    {"torch": "2"},
    "2026-11-21",
)


def config(tmp_path: Path, profile: str = "auto") -> Config:
    (tmp_path / "model").mkdir(exist_ok=True)
    return load_config(None, {"model": tmp_path / "model", "data": tmp_path / "data", "worker": {"profile": profile}})


def test_a_profile_is_kept_beside_the_model_and_found_there(tmp_path: Path) -> None:
    path = store(PROFILE, config(tmp_path))
    assert path.parent == tmp_path / "model" and [p.name for p in path.parent.iterdir()] == [path.name]
    assert fitting(config(tmp_path), SUBJECT) == (PROFILE, "")


def test_where_the_models_folder_takes_no_files_it_is_kept_in_the_data_directory(tmp_path: Path) -> None:
    settings = config(tmp_path)
    (tmp_path / "model").rmdir()
    (tmp_path / "model").write_text("no folder: nobody can write here, whoever asks")
    assert store(PROFILE, settings).parent == tmp_path / "data" / "profiles"
    assert fitting(settings, SUBJECT)[0] == PROFILE


def test_where_nothing_can_be_written_the_remedy_is_named(tmp_path: Path) -> None:
    settings = config(tmp_path)
    (tmp_path / "model").rmdir()
    for name in ("model", "data"):
        (tmp_path / name).write_text("")
    with pytest.raises(ConfigError, match="--data"):
        store(PROFILE, settings)


def test_of_another_model_machine_or_number_of_threads_no_profile_is_taken(tmp_path: Path) -> None:
    store(PROFILE, config(tmp_path))
    for change in (
        {"fingerprint": "00"},
        {"threads": 1},
        {"device": "Another"},
        {"computes": "torch"},
        {"dtype": "float32"},
    ):
        found, why = fitting(config(tmp_path), replace(SUBJECT, **change))
        assert found is None and "upbeat profile" in why


def test_a_renamed_or_damaged_file_is_refused_with_a_reason_and_the_worker_starts_without(tmp_path: Path) -> None:
    other = replace(SUBJECT, threads=7)
    path = store(PROFILE, config(tmp_path))
    moved = path.with_name(path.name.replace(SUBJECT.key, other.key))
    path.rename(moved)
    found, why = fitting(config(tmp_path), other)
    assert found is None and "threads is 2 there and 7 here" in why
    moved.write_text("{")
    found, why = fitting(config(tmp_path), other)
    assert found is None and str(moved) in why


def test_a_file_that_is_named_must_fit_or_nothing_starts(tmp_path: Path) -> None:
    named = tmp_path / "mine.json"
    with pytest.raises(ConfigError, match=r"mine\.json cannot be read"):
        fitting(config(tmp_path, str(named)), SUBJECT)
    named.write_text(encode(PROFILE))
    assert fitting(config(tmp_path, str(named)), SUBJECT)[0] == PROFILE
    with pytest.raises(ConfigError, match=r"worker\.profile = .*threads is 2 there and 9 here.*worker\.profile: auto"):
        fitting(config(tmp_path, str(named)), replace(SUBJECT, threads=9))


def test_off_means_none(tmp_path: Path) -> None:
    store(PROFILE, config(tmp_path))
    assert fitting(config(tmp_path, "off"), SUBJECT) == (None, "worker.profile is off")


def test_a_fresh_worker_reckons_with_what_was_measured(tmp_path: Path) -> None:
    pace = Pace()
    seed(pace, PROFILE)
    assert pace.prefill_token_s == pytest.approx(0.5 / 512)
    assert pace.decode_token_s == pytest.approx(0.02)
    assert (
        pace.request_s == pytest.approx(PROFILE.prefill_s(256) + 128 * pace.marginal_token_s)
        and pace.output_tokens == 128
    )
    assert pace.decode_s(8) == pytest.approx(PROFILE.decode_s(8, 1024))
    pace.stepped(1.0, 0, 1)
    assert pace.decode_token_s > 0.1, "what runs then moves it"


def test_steps_of_many_are_not_reckoned_by_those_of_one_where_weights_are_most_of_a_step() -> None:
    """A worker that had seen single decodes only took sixteen to last as long as sixteen steps, and gave prompts as
    long."""
    computed = Computed(*(Surface((1, 8), (1024,), ((0.020,), (0.030,))) for _ in range(4)))
    pace = Pace()
    seed(pace, profile_of(SUBJECT, "m", SHAPE, computed))
    for _ in range(1000):
        pace.stepped(0.018, 0, 1)
    assert 0.018 <= pace.decode_s(1) <= 0.020 and 0.035 <= pace.decode_s(16) <= 0.045


def test_threads_are_those_that_are_configured_or_a_workers_share(tmp_path: Path) -> None:
    many = load_config(None, {"worker": {"threads": 5}})
    assert compute_threads(many) == 5
    assert compute_threads(load_config(None, {"nodes": {"count": 256, "base_port": 30000}})) == 1
    apart = {"nodes": {"count": 256, "store_host": "node-{n}"}, "tls": {"directory": "/certs"}}
    assert compute_threads(load_config(None, apart)) == (os.cpu_count() or 1), "each node has a host for itself"
