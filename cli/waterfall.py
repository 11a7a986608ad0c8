"""Where a turn's time went, as a waterfall in 80 columns: a bar for each phase until the first token."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping

from contracts.turn_times import WORDS, Phase, checked

_WORDS_WIDTH = max(map(len, WORDS.values()))
_MS_WIDTH = 9
#: The rest of 80 columns: two spaces before each column, a unit at the end.
_BAR_WIDTH = 80 - _WORDS_WIDTH - _MS_WIDTH - 6 - len(" ms")


def lines(until_first_s: Mapping[str, float] | None, after_s: Mapping[str, float] | None) -> Iterator[str]:
    """Lines for a turn's seconds by phase; none if they are not known. A phase that occurred several times is one bar,
    placed by its first occurrence."""
    until, after = checked(until_first_s), checked(after_s)
    if not until:
        return
    whole_s, began_s = sum(until.values()), 0.0
    for phase, seconds in until.items():
        yield f"  {WORDS[phase]:<{_WORDS_WIDTH}}  {_bar(began_s, seconds, whole_s)}  {_ms(seconds):>{_MS_WIDTH}} ms"
        began_s += seconds
    yield from textwrap.wrap(
        f"First token after {_ms(whole_s)} ms{_after(after)}.", 80, initial_indent="  ", subsequent_indent="  "
    )


def _bar(began_s: float, seconds: float, whole_s: float) -> str:
    """A bar of at least one mark, within the width."""
    start, end = (round(_BAR_WIDTH * at_s / whole_s) if whole_s else 0 for at_s in (began_s, began_s + seconds))
    start = min(start, _BAR_WIDTH - 1)
    end = min(max(end, start + 1), _BAR_WIDTH)
    return (" " * start + "#" * (end - start)).ljust(_BAR_WIDTH)


def _after(after: Mapping[Phase, float]) -> str:
    """What followed the first token, as the end of a sentence."""
    if not after:
        return ""
    others_s = sum(after.values()) - after.get(Phase.DECODE, 0.0)
    waited = f", waited for {_ms(others_s)} ms" if _ms(others_s) != "0.0" else ""
    return f", then decoded for {_ms(after.get(Phase.DECODE, 0.0))} ms{waited}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}" if seconds < 10 else f"{seconds * 1e3:.0f}"
