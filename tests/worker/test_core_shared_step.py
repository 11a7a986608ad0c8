"""A step that several tenants share: each has its part, nobody waits behind what another one has, and it is short."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.request import GenerateRequest, Sampling
from worker.core.fairness import Group, Service, group_of
from worker.core.sequence import Sequence, State
from worker.core.shared_step import LEAST_PIECE, Room, room_of, share

#: Ten milliseconds: ten decodes, or a hundred tokens of prompts.
ROOM = Room(1000, 0.010, 0.001, 0.0001)


def sequence(arrival: int, tenant: str, pending: int, priority: int = 0, weight: float = 1.0) -> Sequence:
    request = GenerateRequest(f"r{arrival}", tenant, "s", "m", Sampling(), priority=priority, weight=weight)
    s = Sequence(request, 10 + pending, [1] * (10 + pending), 10, arrival)
    s.computed, s.state = 10, State.RUNNING
    return s


def alike(group: Group) -> float:
    return 0.0


def test_a_short_prompt_is_computed_beside_a_flood_of_prompts_and_decodes() -> None:
    flood = [sequence(n, "a", 3000) for n in range(5)] + [sequence(n, "a", 1) for n in range(5, 40)]
    prompt = sequence(99, "b", 40)
    for ahead in ("a", "b"):
        step = dict(share([*flood, prompt], ROOM, lambda group: 1e-6 * (group[1] != ahead)))  # noqa: B023
        assert step.pop(prompt) == 40
        decodes = sum(count for s, count in step.items() if s.pending == 1)
        prefilled = sum(step.values()) - decodes
        assert decodes >= 3 and prefilled >= 20, "the flood has the rest"


def test_a_tenants_decodes_leave_its_prompt_a_piece_on_a_machine_that_seems_slow() -> None:
    """Else a prompt of 60 tokens took eleven steps, each of which cost more than its tokens."""
    slow = Room(1000, 0.010, 0.001, 0.001)
    prompt, other = sequence(90, "a", 60), sequence(91, "b", 500)
    decodes = [sequence(n, tenant, 1) for n in range(8) for tenant in ("a", "b")]
    step = dict(share([*decodes, prompt, other], slow, lambda group: 1e-6 * (group[1] == "b")))
    assert step[prompt] == LEAST_PIECE and step[decodes[0]] == 1


def test_what_a_tenant_leaves_goes_to_who_was_served_least() -> None:
    a, b, c = sequence(0, "a", 500), sequence(1, "b", 500), sequence(2, "c", 1)
    served = {(0, "a"): 2e-6, (0, "b"): 1e-6, (0, "c"): 0.0}
    step = share([a, b, c], ROOM, served.__getitem__)
    assert step == [(c, 1), (b, pytest.approx(57, abs=1)), (a, pytest.approx(33, abs=1))]


def test_who_was_served_less_has_so_much_more_of_the_step() -> None:
    a, b = sequence(0, "a", 500), sequence(1, "b", 80)
    for behind_s, part in ((0.002, 70), (0.1, 80)):
        step = share([a, b], ROOM, {(0, "a"): 7.0, (0, "b"): 7.0 - behind_s}.__getitem__)
        assert step == [(b, pytest.approx(part, abs=1)), (a, pytest.approx(100 - part, abs=1))]


def test_parts_are_by_weight() -> None:
    heavy, light = sequence(0, "a", 500, weight=3.0), sequence(1, "b", 500)
    assert share([heavy, light], ROOM, alike) == [(heavy, pytest.approx(75, abs=1)), (light, pytest.approx(25, abs=1))]


def test_the_most_urgent_have_all_that_they_want_and_the_others_what_is_left() -> None:
    urgent, plain, later = sequence(0, "a", 60, priority=-1), sequence(1, "b", 500), sequence(2, "a", 1, priority=1)
    assert share([plain, later, urgent], ROOM, alike) == [(urgent, 60), (plain, 40)]
    assert share([plain, later], ROOM, alike) == [(plain, 100)]


def test_within_a_tenant_decodes_take_turns_and_prompts_go_on() -> None:
    decodes, prompt = [sequence(n, "a", 1) for n in range(20)], sequence(20, "a", 400)
    other, seen = sequence(21, "b", 4000), Counter[Sequence]()
    for turn in range(8):
        step = share([*decodes, prompt, other], ROOM, alike)
        for s, count in step:
            s.last_chosen = turn + 1
            seen[s] += count
    assert {seen[s] for s in decodes} <= {1, 2} and seen[prompt] >= 80


def test_a_step_is_as_long_as_configured_or_a_few_lone_decodes() -> None:
    assert room_of(1000, 0.010, 0.002, 0.001, 0.0001).seconds == pytest.approx(0.009), "what any step takes goes off"
    assert room_of(1000, 0.010, 0.020, 0.001, 0.0001).seconds == pytest.approx(0.041)


@given(st.data())
def test_steps_are_short_full_and_nobody_starves(data: st.DataObject) -> None:
    kinds = st.tuples(st.sampled_from("abc"), st.sampled_from([1, 1, 2, 30, 200]), st.integers(0, 1))
    running = [sequence(n, *kind) for n, kind in enumerate(data.draw(st.lists(kinds, min_size=1, max_size=12)))]
    service, steps = Service(), 0
    while running:
        service.seen(groups := {group_of(s) for s in running}, groups)
        step = share(running, ROOM, service.of)
        assert step and all(1 <= count <= s.pending for s, count in step) and len(dict(step)) == len(step)
        cost_s = sum(ROOM.decode_s if s.pending == 1 else count * ROOM.prefill_token_s for s, count in step)
        assert cost_s < ROOM.seconds + (LEAST_PIECE + 1) * ROOM.prefill_token_s
        whole = all(count == s.pending for s, count in step) and len(step) == len(running)
        assert whole or cost_s > ROOM.seconds - ROOM.decode_s, "no room is left that somebody wants"
        for s, count in step:
            s.last_chosen, s.computed = steps, s.computed + count
            service.charge(group_of(s), count * ROOM.prefill_token_s, 1.0)
        running = [s for s in running if s.pending]
        steps += 1
        assert steps < 100
