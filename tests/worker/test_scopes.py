"""Requests of different scopes of one tenant on a real engine: neither `cached_tokens` nor the time to the first token
tells an attacker which prefixes somebody else has sent."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.worker.engine_harness import CHUNK, Harness, random_prompt, tiny_model

#: Tokens of a prompt, and of what is cached of it.
LENGTH = 10 * CHUNK + 1
CACHED = LENGTH - 1


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("scopes"))


@pytest.fixture
def h(model: Path) -> Iterator[Harness]:
    harness = Harness(model, pages=3000, store=False)
    yield harness
    harness.close()


def prompts(count: int, seed: int) -> list[list[int]]:
    dice = random.Random(seed)
    return [random_prompt(dice, LENGTH) for _ in range(count)]


class Attacker:
    """Guesses which prompts the victim has sent. victim, own: their scopes."""

    def __init__(self, h: Harness, victim: str, own: str) -> None:
        self._h, self._victim, self._own = h, victim, own
        #: By whether the victim had sent the prompt: times to the first token in seconds, and `cached_tokens`.
        self.times: dict[bool, list[float]] = {True: [], False: []}
        self.cached: dict[bool, list[int]] = {True: [], False: []}

    def probe(self, count: int, seed: int) -> None:
        """Probe `count` prompts, half of which the victim has sent, in random order."""
        guesses = list(enumerate(prompts(count, seed)))
        for i, prompt in guesses:
            if i % 2:
                self._h.run(prompt, 1, session=f"v{seed}-{i}", cache_salt=self._victim)
        random.Random(seed).shuffle(guesses)
        for i, prompt in guesses:
            began = time.perf_counter()
            result = self._h.run(prompt, 1, session=f"a{seed}-{i}", cache_salt=self._own)
            self.times[bool(i % 2)].append(time.perf_counter() - began)
            self.cached[bool(i % 2)].append(result.cached)

    @property
    def auc(self) -> float:
        """How well time separates the two: 0.5 is chance, 1 is certainty. Of a faster answer for a sent prompt."""
        sent, unsent = np.array(self.times[True]), np.sort(self.times[False])
        later = len(unsent) - np.searchsorted(unsent, sent, "right")
        equal = np.searchsorted(unsent, sent, "right") - np.searchsorted(unsent, sent, "left")
        return float(np.sum(later + equal / 2) / (len(sent) * len(unsent)))


def test_cached_tokens_are_ones_own_and_the_text_is_the_same(model: Path) -> None:
    h = Harness(model, pages=1500)
    (prompt,) = prompts(1, 1)
    asked = [("a", "a"), ("b", "b"), ("", "n"), ("a", "other"), ("b", "a"), ("", "a")]
    answers = [h.run(prompt, 8, session=session, cache_salt=scope) for scope, session in asked]
    assert [answer.cached for answer in answers] == [0, 0, 0, CACHED, CACHED, CACHED]
    assert len({tuple(answer.tokens) for answer in answers}) == 1
    h.purge()  # from the store now
    answers = [h.run(prompt, 8, session=scope, cache_salt=scope) for scope in ("c", "a", "b")]
    assert [answer.cached for answer in answers] == [0, CACHED, CACHED]
    h.close()


def test_a_hint_for_a_session_brings_the_kv_of_its_scope(model: Path) -> None:
    h = Harness(model, pages=1500)
    (prompt,) = prompts(1, 2)
    h.run(prompt, 1, session="s", cache_salt="a")
    h.purge()
    assert h.store is not None
    manifest = h.store.manifests[-1]
    assert (manifest.session.session_id, len(manifest.keys)) == ("s", CACHED // CHUNK)
    h.store.hint("s", manifest.keys)
    for _ in range(500):
        if len(h.contents()) == len(manifest.keys) * h.model.shape.layers:
            break
        time.sleep(0.01)
    asked = len(h.store.asked)
    assert h.run(prompt, 1, session="s", cache_salt="a").cached == CACHED and len(h.store.asked) == asked
    h.close()


def test_within_a_scope_time_tells_and_between_scopes_it_does_not(h: Harness) -> None:
    """The control arm shows that the attack works. A hundred probes bound the other arm to what chance leaves."""
    together, apart = Attacker(h, "", ""), Attacker(h, "a", "b")
    together.probe(60, 3)
    apart.probe(100, 4)
    assert set(together.cached[True]) == {CACHED} and set(together.cached[False]) == {0}
    assert together.auc > 0.9
    assert set(apart.cached[True]) == set(apart.cached[False]) == {0}
    assert 0.3 < apart.auc < 0.7


@pytest.mark.faults
def test_of_ten_thousand_timed_probes_none_tells_more_than_chance(h: Harness) -> None:
    apart = Attacker(h, "a", "b")
    for batch in range(100):
        apart.probe(100, 1000 + batch)
    assert set(apart.cached[True]) == set(apart.cached[False]) == {0}
    print(f"auc {apart.auc:.4f}")
    assert abs(apart.auc - 0.5) <= 0.02
