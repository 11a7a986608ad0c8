"""Stop strings: what the automaton gives out is what a search over the whole text gives, and it costs the same however
many there are."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from worker.core.stops import StopMatcher, StopStrings


class Naive:
    """The same by searching for every stop string after every piece."""

    def __init__(self, stops: list[str], include: bool) -> None:
        self._stops, self._include, self._held, self._stopped = [s for s in stops if s], include, "", False

    def push(self, text: str) -> tuple[str, bool]:
        if self._stopped:
            return "", True
        text = self._held + text
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self._stopped, self._held = True, ""
            end, begin = min(found)
            return text[: end if self._include else begin], True
        keep = max(
            (n for s in self._stops for n in range(1, len(s)) if n <= len(text) and text.endswith(s[:n])), default=0
        )
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def flush(self, text: str) -> str:
        emit, stopped = self.push(text)
        return emit if stopped else emit + self._held


alphabet = st.text("ab\n🦊", max_size=8)
strings = st.lists(alphabet, max_size=16)


@given(strings, st.lists(alphabet, max_size=12), st.booleans(), st.integers(0, 12), alphabet)
@settings(max_examples=600, deadline=None)
@example(["abab", "ba", "bab"], ["a", "ba", "b"], True, 1, "")
@example(["aaab", "aab", "ab"], ["aaaa", "", "b"], False, 0, "")
def test_it_gives_what_a_search_for_each_string_gives_in_whatever_pieces_and_resumed_anywhere(
    stops: list[str], pieces: list[str], include: bool, resumed_at: int, last: str
) -> None:
    matcher, naive = StopMatcher(stops, include), Naive(stops, include)
    resumed: StopMatcher | None = None
    for n, piece in enumerate(pieces):
        if n == resumed_at and not matcher.stopped:
            resumed = StopMatcher(stops, include)
            resumed.prime("".join(pieces[:n]))
        expected = naive.push(piece)
        assert matcher.push(piece) == expected and matcher.stopped is expected[1]
        if resumed is not None:
            assert resumed.push(piece) == expected
    assert matcher.flush(last) == naive.flush(last)


def most(text: str) -> list[str]:
    """As many and as long stop strings as there may be, all of which the text nearly holds."""
    return [text[: 1008 + n] + chr(0x4E00 + n) for n in range(16)]


@pytest.mark.parametrize("text", ["a" * 4000, "ab" * 2000, "".join(chr(97 + n * n % 7) for n in range(4000))])
def test_a_token_costs_microseconds_with_the_most_and_longest_strings(text: str) -> None:
    matcher = StopMatcher(most(text))
    best = []
    for _ in range(3):
        matcher.flush()
        begun = time.thread_time()
        for at in range(0, len(text), 4):
            assert not matcher.push(text[at : at + 4])[1]
        best.append((time.thread_time() - begun) / (len(text) / 4))
    assert min(best) < 20e-6, "searching for each took 5 ms"


def test_the_automaton_is_small_and_soon_made() -> None:
    stops = [chr(0x1F600 + n) * 1024 for n in range(16)]
    begun = time.thread_time()
    made = StopStrings(stops)
    assert time.thread_time() - begun < 0.2
    arrays = (made.chained, made.fallback, made.depth, made.matched)
    assert sum(len(a) * a.itemsize for a in arrays) < 200_000 and sum(map(len, made.branches.values())) <= 16
    assert all(b - a <= 1 for a, b in pairwise(made.depth))
