"""Requests on trial: steps that hold one sequence only, told before they begin, in turns with all others; engines that
stand still."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.request import GenerateRequest, Sampling
from tests.worker.virtual_engine import VirtualEngine
from worker.core.progress import Progress
from worker.core.trials import ROUND_S, TOLD_S, TURN_S, Trials


@dataclass(eq=False)
class Played:
    """A sequence that needs so many steps until its next token."""

    request: GenerateRequest
    arrival: int
    steps: int = 1
    generated: int = 0
    ran: list[float] = field(default_factory=list)


def played(arrival: int, *, alone: bool = False, resumed: int = 0, steps: int = 1) -> Played:
    request = GenerateRequest(
        f"r{arrival}", "t", "s", "m", Sampling(), prompt="x", alone=alone, resume_tokens=[1] * resumed
    )
    return Played(request, arrival, steps, resumed)


class Run:
    """Steps of `step_s` until a time; checks at each that what runs is what was told."""

    def __init__(self, sequences: list[Played], step_s: float = 0.02) -> None:
        self.trials, self.sequences, self.step_s, self.now = Trials(), sequences, step_s, 0.0
        self.told: list[tuple[float, str]] = []

    def until(self, end_s: float) -> None:
        while self.now < end_s:
            before = self.trials.told
            batch = self.trials.turn(self.sequences, self.now)
            self.trials.validate()
            if self.trials.told != before:
                self.told.append((self.now, self.trials.told))
                assert not batch, "the word goes out first"
            if not batch:
                rest_s = self.trials.rest_s(self.now)
                self.now += self.step_s if rest_s is None else rest_s + 1e-6
                continue
            names = {s.request.request_id for s in batch}
            on_trial = {
                s.request.request_id for s in batch if s.request.alone and s.generated <= len(s.request.resume_tokens)
            }
            assert names == {self.trials.told} if self.trials.told else not on_trial
            assert not self.told or self.now - self.told[-1][0] >= TOLD_S
            self.now += self.step_s
            for s in batch:
                s.ran.append(self.now)
                s.steps -= 1
                s.generated += s.steps <= 0


def test_without_a_request_on_trial_steps_hold_everybody() -> None:
    sequences = [played(0), played(1)]
    trials = Trials()
    assert trials.turn(sequences, 0.0) == sequences and trials.told == "" and trials.rest_s(0.0) is None


def test_trials_go_one_by_one_those_with_most_tokens_first_and_everybody_else_has_as_long_as_they() -> None:
    tried = [played(n, alone=True, resumed=n) for n in range(40)]
    other = played(40)
    run = Run([*tried, other])
    run.until(0.01)
    while run.trials.told or not all(s.ran for s in tried):
        run.until(run.now + 0.01)
    assert [name for _, name in run.told if name] == [f"r{n}" for n in reversed(range(40))]
    trials_s, all_s = 40 * (run.step_s + TOLD_S), run.now
    assert trials_s < all_s < 2.3 * trials_s
    waits = [b - a for a, b in pairwise([0.0, *other.ran])]
    assert max(waits) < ROUND_S + 3 * (run.step_s + TOLD_S), "nobody else waits for long"


def test_a_long_prompt_on_trial_takes_half_of_the_engine_at_most_and_the_short_ones_do_not_wait_for_its_end() -> None:
    long, short, other = played(0, alone=True, resumed=9, steps=1000), played(1, alone=True), played(2)
    run = Run([long, short, other])
    run.until(12 * TURN_S)
    assert short.ran[0] < 4 * TURN_S
    assert 0.3 < len(long.ran) / (len(long.ran) + len(other.ran)) <= 0.55


def test_the_trial_of_one_that_is_gone_is_over() -> None:
    gone, other = played(0, alone=True, steps=100), played(1)
    run = Run([gone, other])
    run.until(0.2)
    assert run.trials.told == "r0"
    run.sequences.remove(gone)
    run.until(1.0)
    assert run.trials.told == "" and other.ran


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9), st.integers(1, 120)), min_size=1, max_size=8))
def test_everybody_gets_a_token_whoever_is_on_trial(kinds: list[tuple[bool, int, int]]) -> None:
    run = Run([played(n, alone=alone, resumed=resumed, steps=steps) for n, (alone, resumed, steps) in enumerate(kinds)])
    run.until(2.2 * sum(steps * run.step_s + 2 * TOLD_S for _, _, steps in kinds) + 4 * TURN_S)
    assert all(s.generated > len(s.request.resume_tokens) for s in run.sequences)


def test_an_engine_computes_a_request_on_trial_alone_and_all_end_with_their_own_tokens() -> None:
    e = VirtualEngine(pages=240)
    told: list[str] = []
    e.engine.on_trial = told.append
    one = e.submit(list(range(30)), 40)
    e.go(lambda: len(e.answers[one].tokens) > 3)
    tried = [e.submit(list(range(40 + n, 70 + n)), 10, alone=True) for n in range(3)]
    while not all(e.answers[name].tokens for name in tried):
        gained = {name: len(answer.tokens) for name, answer in e.answers.items()}
        if not e.engine.core.going_on and e.engine.inbox.empty():
            e.world.next(e.engine.core.scheduling.trials.rest_s(e.world.now()) or 0.5)
        e.turn()
        if trial := e.engine.core.scheduling.trials.told:
            assert {name for name, answer in e.answers.items() if len(answer.tokens) > gained[name]} <= {trial}
    assert [name for name in told if name] == tried
    e.finish()


# ---- an engine that stands still
# -------------------------------------------------------------------------------------------
def test_an_engine_stands_still_from_when_its_step_should_have_ended_and_not_while_it_rests() -> None:
    progress = Progress()
    assert progress.stalled_s(100.0) == 0.0, "it has not begun"
    progress.step(10.0, expected_s=4.0)
    assert progress.stalled_s(13.9) == 0.0 and progress.stalled_s(17.0) == 3.0
    progress.seen(16.5)  # a layer
    assert progress.stalled_s(17.0) == 0.5
    progress.stepped(17.5)
    assert progress.stalled_s(18.0) == 0.5
    progress.rests()
    assert progress.stalled_s(1e9) == 0.0
