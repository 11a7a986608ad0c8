"""Who computes in a step: decodes keep their pace, nobody starves, priorities hold. Time is virtual."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.request import GenerateRequest, Sampling
from worker.core.batching import ALONE_TIMES, LEAST_MIXED_TOKENS, MAX_PREFILL_STRETCH, Budget, choose, mixed_tokens
from worker.core.sequence import Sequence, State

TOKEN_S = 0.001


def sequence(arrival: int, tokens: int, computed: int = 0, priority: int = 0, arrival_s: float = 0.0) -> Sequence:
    request = GenerateRequest(f"r{arrival}", "t", "s", "m", Sampling(), priority=priority)
    s = Sequence(request, tokens, [1] * tokens, 10, arrival, arrival_s)
    s.computed, s.state = computed, State.RUNNING
    return s


def budget(step_tokens: int, mixed: int | None = None) -> Budget:
    return Budget(step_tokens, step_tokens if mixed is None else mixed, TOKEN_S)


def test_decodes_come_before_prefills_and_a_long_prefill_is_cut_to_the_budget() -> None:
    decode, long = sequence(2, 10, computed=9), sequence(0, 100)
    assert choose([long, decode], budget(50)) == [(decode, 1), (long, 49)]


def test_beside_a_decode_prefills_share_what_a_mixed_step_may_add() -> None:
    decode, long, longer = sequence(2, 10, computed=9), sequence(0, 100), sequence(1, 200)
    assert choose([longer, long, decode], budget(1000, mixed=40)) == [(decode, 1), (long, 40)]
    long.computed = 70
    assert choose([longer, long, decode], budget(1000, mixed=40)) == [(decode, 1), (long, 30), (longer, 10)]
    assert choose([longer, long], budget(1000, mixed=400)) == [(long, 30), (longer, 200)]
    assert choose([longer, long], budget(1000, mixed=60)) == [(long, 30), (longer, 30)], (
        "who comes waits for the end of the step"
    )


def test_a_prefill_that_is_more_urgent_than_every_decode_is_not_held_back_for_them() -> None:
    decode, urgent, plain = sequence(0, 10, computed=9), sequence(1, 100, priority=-1), sequence(2, 100)
    assert choose([plain, urgent, decode], budget(1000, mixed=32)) == [(decode, 1), (urgent, 100)]
    assert choose([plain, decode], budget(1000, mixed=32)) == [(decode, 1), (plain, 32)]


def test_an_urgent_prefill_goes_first_then_the_one_that_is_due_first() -> None:
    long, short, urgent = (
        sequence(0, 5000),
        sequence(1, 100, arrival_s=1.0),
        sequence(2, 9000, priority=-1, arrival_s=2.0),
    )
    assert [s for s, _ in choose([long, short, urgent], budget(9300))] == [urgent, short, long]
    due = MAX_PREFILL_STRETCH * 5000 * TOKEN_S
    soon, late = (
        sequence(3, 100, arrival_s=due - MAX_PREFILL_STRETCH * 100 * TOKEN_S + past) for past in (-0.01, 0.01)
    )
    assert [s for s, _ in choose([long, soon], budget(100))] == [soon]
    assert [s for s, _ in choose([long, late], budget(1024))] == [long], "it was due before"


def test_a_step_is_sized_by_the_pace_and_never_so_small_that_prefills_stand_still() -> None:
    assert mixed_tokens(0.2, decode_s=0.04, prefill_token_s=0.001) == 160
    assert mixed_tokens(0.2, decode_s=0.1, prefill_token_s=0.001) == 100
    assert mixed_tokens(0.2, decode_s=0.3, prefill_token_s=0.001) == 300, "half of the step, however long"
    assert mixed_tokens(0.2, decode_s=0.001, prefill_token_s=0.1) == LEAST_MIXED_TOKENS
    assert mixed_tokens(0.2, decode_s=0.0, prefill_token_s=0.001) == ALONE_TIMES * 200, "nobody waits for a token"
    assert mixed_tokens(0.0, 0.01, 0.001) is None and mixed_tokens(0.0, 0.0, 0.001) is None


def test_decodes_that_do_not_fit_a_step_take_turns_and_prefills_go_on_beside_them() -> None:
    decodes, prefill = [sequence(i, 10, computed=9) for i in range(30)], sequence(30, 1000)
    ran = [0] * 30
    for step in range(60):
        chosen = choose([*decodes, prefill], budget(16))
        assert sum(count for _, count in chosen) == 16 and chosen[-1] == (prefill, 4)
        for n, (s, count) in enumerate(chosen):
            s.last_chosen = step * 16 + n + 1
            if s is prefill:
                s.computed += count
            else:
                ran[s.arrival] += 1
    assert set(ran) == {24}


@dataclass
class Simulated:
    """A device that computes prefills and decodes at a fixed pace; decodes end after `outputs` tokens."""

    step_tokens: int
    step_s: float
    decode_s: float = 0.002
    now: float = 0.0
    live: list[Sequence] = field(default_factory=list)
    outputs: dict[int, int] = field(default_factory=dict)
    prefilled_s: dict[int, float] = field(default_factory=dict)
    longest_gap_s: float = 0.0
    _chosen: int = 0
    _token_s: dict[int, float] = field(default_factory=dict)

    def step(self) -> None:
        decodes = sum(s.pending == 1 for s in self.live)
        mixed = mixed_tokens(self.step_s, decodes * self.decode_s, TOKEN_S)
        chosen = choose(self.live, Budget(self.step_tokens, self.step_tokens if mixed is None else mixed, TOKEN_S))
        assert chosen and all(0 < count <= s.pending for s, count in chosen)
        assert sum(count for _, count in chosen) <= self.step_tokens
        assert len({s.arrival for s, _ in chosen}) == len(chosen)
        self.now += sum(self.decode_s if s.pending == 1 else TOKEN_S * count for s, count in chosen)
        for s, count in chosen:
            s.computed += count
            self._chosen += 1
            s.last_chosen = self._chosen
            if s.pending == 0:
                if s.arrival in self._token_s:
                    self.longest_gap_s = max(self.longest_gap_s, self.now - self._token_s[s.arrival])
                else:
                    self.prefilled_s[s.arrival] = self.now
                self._token_s[s.arrival] = self.now
                s.tokens.append(1)
                self.outputs[s.arrival] -= 1
        self.live = [s for s in self.live if self.outputs[s.arrival]]


Requests = st.lists(
    st.tuples(
        st.sampled_from([1, 20, 100, 500, 4000]),
        st.integers(1, 6),
        st.floats(0, 2, allow_nan=False),
        st.integers(-1, 1),
    ),
    min_size=1,
    max_size=25,
)


@settings(max_examples=120, deadline=None)
@given(requests=Requests, step_tokens=st.sampled_from([64, 256, 1024]), step_s=st.sampled_from([0.0, 0.05, 0.2]))
def test_a_prompt_is_only_passed_by_what_came_before_it_was_due_or_is_more_urgent(
    requests: list[tuple[int, int, float, int]], step_tokens: int, step_s: float
) -> None:
    sim = Simulated(step_tokens, step_s)
    coming = sorted(requests, key=lambda r: r[2])
    made: dict[int, Sequence] = {}
    while coming or sim.live:
        if not sim.live:
            sim.now = max(sim.now, coming[0][2])
        while coming and coming[0][2] <= sim.now:
            tokens, outputs, at, priority = coming.pop(0)
            s = sequence(len(made), tokens, priority=priority, arrival_s=at)
            made[s.arrival], sim.outputs[s.arrival] = s, outputs
            sim.live.append(s)
        sim.step()
    # Everything ends, and nobody later than all the work that may go first, a step's slack for each cut included.
    decoding_s = sum(outputs for _, outputs, _, _ in requests) * sim.decode_s
    for s in made.values():
        due = s.arrival_s + MAX_PREFILL_STRETCH * s.prompt_tokens * TOKEN_S
        before = [o for o in made.values() if o.request.priority < s.request.priority or o.arrival_s <= due]
        work_s = sum(o.prompt_tokens * TOKEN_S for o in before)
        last_arrival_s = max(o.arrival_s for o in before)
        least = LEAST_MIXED_TOKENS * TOKEN_S if step_s else 0.0
        assert (
            sim.prefilled_s[s.arrival]
            <= max(last_arrival_s, s.arrival_s) + work_s + decoding_s + step_tokens * TOKEN_S + least
        )
    if step_s and len({r[3] for r in requests}) == 1:
        most_decodes = min(len(requests), step_tokens)
        bound_s = max(step_s, 2 * most_decodes * sim.decode_s)
        assert sim.longest_gap_s <= bound_s + LEAST_MIXED_TOKENS * TOKEN_S + 2 * most_decodes * sim.decode_s + 1e-9


def test_a_long_prompt_under_a_stream_of_short_ones_is_computed_in_bounded_time() -> None:
    """More than can be computed: shortest first would never come to it; in order of arrival all short ones would wait
    for it."""
    sim, long_s = Simulated(256, 0.2), 1.0
    long = sequence(0, round(long_s / TOKEN_S))
    sim.live, sim.outputs = [long], {0: 1}
    made = 1
    while 0 not in sim.prefilled_s:
        while made * 0.09 <= sim.now:  # a prompt of 100 tokens takes 0.1 s and one comes every 0.09 s
            sim.live.append(sequence(made, 100, arrival_s=made * 0.09))
            sim.outputs[made] = 1
            made += 1
        sim.step()
        assert sim.now < 60
    # What had come until it was due goes first.
    assert sim.now <= MAX_PREFILL_STRETCH * long_s / 0.09 * 0.1 + long_s + 1
    waits = [sim.prefilled_s[n] - n * 0.09 for n in range(1, 20)]
    assert max(waits) < 0.8 * long_s, "in order of arrival each would wait for the long one"
