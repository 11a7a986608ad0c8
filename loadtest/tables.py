"""Tables with a row a policy and a column a figure, split into as many tables as the console's width needs.

Decides the layout only; callers supply figures as text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console, ConsoleOptions, RenderableType
from rich.table import Table
from rich.text import Text

_GAP = 2


class PolicyTables:
    """Tables that fit a console of at least 40 columns; nothing is cut, no row takes two lines."""

    def __init__(self, title: str, policies: Sequence[str], figures: Mapping[str, Sequence[str]]) -> None:
        """figures: by heading, a value a policy, in the order of `policies`."""
        self._title, self._policies, self._figures = title, policies, figures

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        yield Text(self._title, style="bold")
        first = max(map(len, ("policy", *self._policies)))
        waiting = list(self._figures)
        while waiting:
            left, shown = options.max_width - first, list[str]()
            while waiting and (not shown or self._width(waiting[0]) + _GAP <= left):
                left -= self._width(waiting[0]) + _GAP
                shown.append(waiting.pop(0))
            yield Text()
            yield self._table(first, shown)

    def _table(self, first: int, shown: Sequence[str]) -> Table:
        made = Table(box=None, pad_edge=False, header_style="bold", padding=(0, _GAP, 0, 0))
        made.add_column("policy", width=first, no_wrap=True)
        for heading in shown:
            made.add_column(heading, width=self._width(heading), justify="right", overflow="fold")
        for n, policy in enumerate(self._policies):
            made.add_row(policy, *(self._figures[heading][n] for heading in shown))
        return made

    def _width(self, heading: str) -> int:
        """Width of a column: headings may break between words, values may not."""
        return max(map(len, (*heading.split(), *self._figures[heading])))
