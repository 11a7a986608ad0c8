"""The launcher's decisions: what a stack consists of, when a service is started again, who stops when."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.core.plan import STOP_ORDER, compute_threads, stack_plan
from cli.core.restart import FIRST_DELAY_S, LONGEST_DELAY_S, REPEATS, RestartPolicy
from contracts.exits import START_AGAIN


def exits(
    policy: RestartPolicy, times: int, *, alive_s: float = 1.0, status: int = 1, line: str = "no", served: bool = True
) -> list[object]:
    return [
        policy.exited(alive_s=alive_s, status=status, last_line=line, has_served=served).delay_s for _ in range(times)
    ]


def test_a_stack_has_a_store_and_a_worker_a_node_and_one_of_everything_else() -> None:
    assert [p.name for p in stack_plan(2)] == ["scheduler", "kvstore-0", "kvstore-1", "worker-0", "worker-1", "gateway"]
    assert stack_plan(2)[2].arguments("c.yaml") == ["--config", "c.yaml", "--node", "1"]
    assert stack_plan(2)[0].arguments("c.yaml") == ["--config", "c.yaml"]
    assert [p.name for p in stack_plan(1, 1, 3)][-3:] == ["gateway", "gateway-1", "gateway-2"]
    assert [p.name for p in stack_plan(1, 3)] == [
        "scheduler",
        "scheduler-1",
        "scheduler-2",
        "kvstore-0",
        "worker-0",
        "gateway",
    ]
    assert stack_plan(1, 3)[2].arguments("c.yaml") == ["--config", "c.yaml", "--number", "2"]


def test_a_node_of_several_devices_has_a_worker_for_each_and_one_store() -> None:
    workers = [p for p in stack_plan(2, devices=2) if p.program == "upbeat-worker"]
    assert [p.name for p in workers] == ["worker-0-0", "worker-0-1", "worker-1-0", "worker-1-1"]
    assert workers[2].arguments("c.yaml") == ["--config", "c.yaml", "--node", "1"]
    assert workers[3].arguments("c.yaml") == ["--config", "c.yaml", "--node", "1", "--device", "1"]
    assert [p.name for p in stack_plan(2, devices=2) if p.program == "upbeat-kvstore"] == ["kvstore-0", "kvstore-1"]


def test_everything_that_is_started_is_stopped_within_thirty_seconds_and_stores_outlive_workers() -> None:
    programs = [program for program, _ in STOP_ORDER]
    assert set(programs) == {p.program for p in stack_plan(2, vllm=[1])}
    assert programs.index("upbeat-gateway") < programs.index("upbeat-worker") < programs.index("upbeat-kvstore")
    deadlines = [deadline for _, deadline in STOP_ORDER]
    assert deadlines == sorted(deadlines) and deadlines[-1] < 30


@pytest.mark.parametrize(
    ("configured", "cores", "workers", "threads"), [(0, 8, 2, 4), (0, 2, 4, 1), (3, 8, 2, 3), (0, 7, 2, 3)]
)
def test_cores_are_shared_between_workers(configured: int, cores: int, workers: int, threads: int) -> None:
    assert compute_threads(configured, cores, workers) == threads


def test_delays_double_up_to_five_seconds() -> None:
    assert exits(RestartPolicy(), 8) == pytest.approx([0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0])


def test_a_service_that_lived_long_is_started_again_at_once() -> None:
    policy = RestartPolicy()
    exits(policy, 6)
    assert exits(policy, 1, alive_s=31.0) == [FIRST_DELAY_S]


def test_a_wrong_configuration_is_final_until_the_stack_has_served() -> None:
    verdict = RestartPolicy().exited(alive_s=0.5, status=2, last_line="kv.hbm_gib = -1", has_served=False)
    assert verdict.delay_s is None and verdict.show_log


def test_a_stack_that_has_served_outlives_a_service_whose_model_has_gone() -> None:
    policy = RestartPolicy()
    verdicts = [policy.exited(alive_s=0.5, status=2, last_line="no such model", has_served=True) for _ in range(9)]
    assert [v.show_log for v in verdicts] == [True] + 8 * [False]
    assert verdicts[-1].delay_s == LONGEST_DELAY_S


def test_five_equal_failures_end_a_stack_that_never_served() -> None:
    delays = exits(RestartPolicy(), REPEATS, served=False)
    assert None not in delays[:-1] and delays[-1] is None


def test_failures_that_differ_only_in_numbers_are_equal() -> None:
    policy = RestartPolicy()
    verdicts = [
        policy.exited(alive_s=1.0, status=1, last_line=f"12:0{i} port {i} taken", has_served=False)
        for i in range(REPEATS)
    ]
    assert verdicts[-1].delay_s is None


def test_failures_that_differ_are_tried_again() -> None:
    policy = RestartPolicy()
    for word in "abcdefgh":
        assert policy.exited(alive_s=1.0, status=1, last_line=word, has_served=False).delay_s is not None


def test_a_stack_that_has_served_shows_the_log_once_and_goes_on() -> None:
    policy = RestartPolicy()
    verdicts = [policy.exited(alive_s=1.0, status=1, last_line="no", has_served=True) for _ in range(9)]
    assert [v.show_log for v in verdicts] == [i + 1 == REPEATS for i in range(9)]
    assert all(v.delay_s is not None for v in verdicts)


def test_a_service_that_asks_to_be_started_again_has_not_failed() -> None:
    policy = RestartPolicy()
    for _ in range(3 * REPEATS):
        verdict = policy.exited(alive_s=1.0, status=START_AGAIN, last_line="same", has_served=False)
        assert verdict.delay_s is not None and not verdict.show_log
    exits(policy, REPEATS - 1, served=False)
    policy.exited(alive_s=1.0, status=START_AGAIN, last_line="no", has_served=False)
    assert None not in exits(policy, REPEATS - 1, served=False), "failures before it do not count"
    assert exits(RestartPolicy(), 1, alive_s=31.0, status=START_AGAIN) == [FIRST_DELAY_S]


STATUSES = st.one_of(st.integers(-15, 3), st.just(START_AGAIN))


@given(st.lists(st.tuples(st.floats(0, 100), STATUSES, st.sampled_from("ab"), st.booleans()), max_size=40))
def test_any_history_keeps_the_delay_in_its_bounds(history: list[tuple[float, int, str, bool]]) -> None:
    policy = RestartPolicy()
    for alive_s, status, line, served in history:
        verdict = policy.exited(alive_s=alive_s, status=status, last_line=line, has_served=served)
        policy.validate()
        assert verdict.delay_s is None or FIRST_DELAY_S <= verdict.delay_s <= LONGEST_DELAY_S
        assert verdict.delay_s is not None or verdict.show_log, "whoever gives up says why"
