"""The soak's own judgement: what grows is said, what swings is not."""

from __future__ import annotations

from tests.soak.leaks import Held, held_at_rest, leaks

MIB = 1 << 20


def run(**series: list[int]) -> list[dict[str, Held]]:
    count = len(next(iter(series.values())))
    plain = {"memory_bytes": 200 * MIB, "descriptors": 40, "threads": 8, "tasks": 30, "pid": 7}
    return [{"worker-0": Held(**(plain | {name: values[i] for name, values in series.items()}))} for i in range(count)]


def test_what_grows_all_the_time_is_a_leak() -> None:
    assert leaks(run(descriptors=list(range(40, 130, 10)))) == ["worker-0: descriptors grew from 50 to 110"]
    assert leaks(run(memory_bytes=[(200 + 20 * i) * MIB for i in range(9)])) == [
        "worker-0: memory grew from 220 to 340 MiB"
    ]
    assert leaks(run(tasks=[10, 10, 10, 500, 500, 500])) == ["worker-0: tasks grew from 10 to 500"]
    assert leaks(run(threads=[30, 30, 50])) == ["worker-0: threads grew from 30 to 50"]


def test_what_swings_or_stays_is_none_and_a_new_process_is_no_growth() -> None:
    assert leaks(run(descriptors=[40, 90, 40, 90, 40, 90, 40, 90, 40])) == []
    assert leaks(run(memory_bytes=[200 * MIB, 230 * MIB, 240 * MIB])) == []
    assert leaks(run(pid=[7, 7, 8], descriptors=[10, 10, 900])) == []
    assert leaks([]) == []


def test_what_is_held_at_rest_is_named() -> None:
    samples = {
        "kvstore-0": {'upbeat_kvstore_held{what="lent_leases"}': 1.0, 'upbeat_kvstore_used_bytes{tier="dram"}': 5.0},
        "gateway": {"upbeat_gateway_active_generations": 0.0},
    }
    assert held_at_rest(samples) == ['kvstore-0: upbeat_kvstore_held{what="lent_leases"} is 1']
