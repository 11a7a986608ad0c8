"""Where a turn's time went, as a waterfall in 80 columns: a line a phase until its first token, a bar from where it began."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping

from contracts.turn_times import WORDS, Phase, checked

_WORDS_WIDTH = max(map(len, WORDS.values()))
_MS_WIDTH = 9
#: With two spaces before each column and a unit at the end, 80 columns are full.
_BAR_WIDTH = 80 - _WORDS_WIDTH - _MS_WIDTH - 6 - len(" ms")


def lines(until_first_s: Mapping[str, float] | None, after_s: Mapping[str, float] | None) -> Iterator[str]:
    """What is shown of a turn's seconds by phase; nothing where nobody has said them. Phases that came by turns are each one bar, in the
    order in which they begin."""
    until, after = checked(until_first_s), checked(after_s)
    if not until:
        return
    whole_s, began_s = sum(until.values()), 0.0
    for phase, seconds in until.items():
        yield f"  {WORDS[phase]:<{_WORDS_WIDTH}}  {_bar(began_s, seconds, whole_s)}  {_ms(seconds):>{_MS_WIDTH}} ms"
        began_s += seconds
    yield from textwrap.wrap(f"First token after {_ms(whole_s)} ms{_after(after)}.", 80, initial_indent="  ", subsequent_indent="  ")


def _bar(began_s: float, seconds: float, whole_s: float) -> str:
    """At least a mark, however short; within the width, whatever was rounded."""
    start, end = (round(_BAR_WIDTH * at_s / whole_s) if whole_s else 0 for at_s in (began_s, began_s + seconds))
    start = min(start, _BAR_WIDTH - 1)
    end = min(max(end, start + 1), _BAR_WIDTH)
    return (" " * start + "#" * (end - start)).ljust(_BAR_WIDTH)


def _after(after: Mapping[Phase, float]) -> str:
    """What came after the first token: a sentence's end."""
    if not after:
        return ""
    others_s = sum(after.values()) - after.get(Phase.DECODE, 0.0)
    waited = f", waited for {_ms(others_s)} ms" if _ms(others_s) != "0.0" else ""
    return f", then decoded for {_ms(after.get(Phase.DECODE, 0.0))} ms{waited}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}" if seconds < 10 else f"{seconds * 1e3:.0f}"
