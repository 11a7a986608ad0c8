"""Targets for the first token: as few requests as possible are late, nobody waits for ever, and without targets nothing
changes."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.worker.virtual_device import VirtualDevice
from tests.worker.virtual_model import CHUNK, random_prompt
from worker.core.arbitration import Job, late
from worker.core.policy import Policy
from worker.engine.policies import within

NOW = 100.0
JOBS = st.lists(
    st.builds(lambda after, cost: (NOW + after / 4, cost / 4), st.integers(0, 40), st.integers(1, 12)), max_size=7
)


def jobs_of(drawn: list[tuple[float, float]]) -> list[Job]:
    return [Job(n, 0, deadline_s, 10 * NOW, cost_s) for n, (deadline_s, cost_s) in enumerate(drawn)]


def all_in_time(jobs: list[Job]) -> bool:
    ends_s = NOW
    for job in sorted(jobs, key=lambda job: job.ends_s(NOW)):
        ends_s += job.cost_s
        if ends_s > job.ends_s(NOW):
            return False
    return True


@given(JOBS)
def test_as_few_are_late_as_possible(drawn: list[tuple[float, float]]) -> None:
    jobs = jobs_of(drawn)
    left = late(jobs, NOW)
    assert all_in_time([job for job in jobs if job.key not in left])
    fewer = (
        subset
        for size in range(len(jobs), len(jobs) - len(left), -1)
        for subset in itertools.combinations(jobs, size)
        if all_in_time(list(subset))
    )
    assert not left or next(fewer, None) is None


@given(JOBS)
def test_without_targets_nobody_leaves(drawn: list[tuple[float, float]]) -> None:
    assert not late([replace(job, deadline_s=None) for job in jobs_of(drawn)], NOW)


@given(JOBS, st.integers(0, 6))
def test_who_is_past_deadline_and_due_time_does_not_leave(drawn: list[tuple[float, float]], number: int) -> None:
    jobs = [replace(job, due_s=NOW - 1 if job.key == number else job.due_s) for job in jobs_of(drawn)]
    left = late(jobs, NOW)
    assert all(job.key not in left for job in jobs if job.key == number and job.deadline_s == NOW)


def test_a_job_does_not_leave_for_a_less_urgent_one() -> None:
    jobs = [Job("urgent", 0, NOW + 10, 10 * NOW, 6.0), Job("other", 1, NOW + 8, 10 * NOW, 5.0)]
    assert late(jobs, NOW) == {"other"}


def prompt(seed: int, chunks: int) -> list[int]:
    return random_prompt(random.Random(seed), chunks * CHUNK)


@pytest.mark.parametrize("targets", [(), (60.0, 0.2)])
def test_a_model_with_a_target_goes_before_the_long_prompts_of_another(targets: tuple[float, ...]) -> None:
    """Without targets the models take turns, step by step."""
    device = VirtualDevice(2, 400, targets=targets, step_tokens=32)
    a, b = device.models
    for each in (a, b):
        each.runner.token_s = each.engine.core.pace.prefill_token_s = 0.001
    for n in range(4):
        a.submit(prompt(n, 60), 1)
    device.go(until=lambda: device.world.now() > 0.05)
    name, began_s = b.submit(prompt(9, 20), 1), device.world.now()
    device.go(until=lambda: bool(b.answers[name].times_s))
    took_s = b.answers[name].times_s[0] - began_s
    assert took_s < 0.16 if targets else took_s > 0.24
    device.finish()


def test_a_request_that_cannot_be_in_time_is_answered_although_others_keep_coming() -> None:
    device = VirtualDevice(2, 400, targets=(0.02, 0.02))
    a, b = device.models
    for each in (a, b):
        each.runner.token_s = each.engine.core.pace.prefill_token_s = 0.001
    hopeless = a.submit(prompt(1, 30), 1)

    def come(n: int) -> None:
        b.submit(prompt(n, 2), 1)
        if n < 2000 and not a.answers[hopeless].times_s:
            device.world.at(0.009, lambda: come(n + 1))

    come(2)
    device.go(until=lambda: bool(a.answers[hopeless].times_s))
    device.finish()


@pytest.mark.parametrize(("mixed_s", "token_s", "found"), [(0.1, 0.0, 0.1), (0.1, 0.05, 0.025), (0.0, 0.05, 0.025)])
def test_steps_with_prompts_leave_half_of_the_tightest_target_for_a_token(
    mixed_s: float, token_s: float, found: float
) -> None:
    assert within(Policy(mixed_step_s=mixed_s), token_s).mixed_step_s == found
