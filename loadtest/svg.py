"""Plots as SVG text: lines with whiskers over loads, and cumulative distributions. Pure.

Colours are Okabe and Ito's, which are distinguishable with colour blindness.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999933")
_WIDTH, _HEIGHT = 520, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 34, 46
_TICKS = 5


@dataclass(frozen=True, slots=True)
class Value:
    """A point of a line, with the minimum and maximum measured."""

    x: float
    y: float
    low: float
    high: float


def nice_ticks(low: float, high: float, count: int = _TICKS) -> list[float]:
    """About `count` round numbers covering [low, high], spaced 1, 2 or 5 times a power of ten."""
    span = max(high - low, 1e-12)
    step = 10.0 ** math.floor(math.log10(span / count))
    step *= next(factor for factor in (1, 2, 5, 10) if span / (step * factor) <= count)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [n * step for n in range(first, max(last, first + 1) + 1)]


def line_plot(title: str, x_title: str, y_title: str, series: Mapping[str, Sequence[Value]]) -> str:
    """A line with whiskers for each series; the y axis starts at 0. Empty if there are no values."""
    shown = {name: sorted(values, key=lambda v: v.x) for name, values in series.items() if values}
    points = [v for values in shown.values() for v in values]
    if not points:
        return ""
    xs = sorted({v.x for v in points})
    canvas = _Canvas(title, x_title, y_title, (min(xs), max(xs)), (0.0, max(v.high for v in points)), x_ticks=xs)
    for number, name in enumerate(series):
        colour = COLOURS[number % len(COLOURS)]
        values = shown.get(name, [])
        canvas.polyline([(v.x, v.y) for v in values], colour)
        for v in values:
            if v.high > v.low:
                canvas.whisker(v.x, v.low, v.high, colour)
            canvas.marker(v.x, v.y, colour, f"{name}: {v.y:.4g} ({v.low:.4g} to {v.high:.4g}) at {v.x:g}")
    return canvas.done()


def distribution_plot(title: str, x_title: str, series: Mapping[str, Sequence[float]]) -> str:
    """The empirical distribution of each series as a step line, cut at the 99.5th percentile of all values."""
    everything = sorted(v for values in series.values() for v in values)
    if not everything:
        return ""
    longest = everything[min(len(everything) - 1, int(0.995 * len(everything)))] or 1.0
    canvas = _Canvas(title, x_title, "share of requests", (0.0, longest), (0.0, 1.0))
    for number, (_, values) in enumerate(series.items()):
        ordered = sorted(values)
        steps = [(0.0, 0.0)]
        for i, value in enumerate(ordered):
            if value > longest:
                break
            steps += [(value, i / len(ordered)), (value, (i + 1) / len(ordered))]
        canvas.polyline(steps, COLOURS[number % len(COLOURS)])
    return canvas.done()


class _Canvas:
    """One plot; the constructor draws the axes."""

    def __init__(
        self,
        title: str,
        x_title: str,
        y_title: str,
        x_span: tuple[float, float],
        y_span: tuple[float, float],
        x_ticks: Sequence[float] | None = None,
    ) -> None:
        y_marks = nice_ticks(*y_span)
        x_marks = list(x_ticks) if x_ticks is not None and len(x_ticks) <= 8 else nice_ticks(*x_span)
        self._x0, self._x1 = min(x_marks[0], x_span[0]), max(x_marks[-1], x_span[1])
        if self._x0 == self._x1:
            self._x0, self._x1 = self._x0 - 1, self._x1 + 1
        self._y0, self._y1 = y_marks[0], y_marks[-1]
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
            f'aria-label="{escape(title)}">',
            f'<text class="title" x="{_LEFT}" y="18">{escape(title)}</text>',
        ]
        for mark in y_marks:
            y = self._y(mark)
            self._parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            self._parts.append(
                f'<text class="tick" x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{mark:.4g}</text>'
            )
        for mark in x_marks:
            self._parts.append(
                f'<text class="tick" x="{self._x(mark):.1f}" y="{_HEIGHT - _BOTTOM + 16}" '
                f'text-anchor="middle">{mark:.4g}</text>'
            )
        middle = (_LEFT + _WIDTH - _RIGHT) / 2
        self._parts.append(
            f'<text class="axis" x="{middle}" y="{_HEIGHT - 10}" text-anchor="middle">{escape(x_title)}</text>'
        )
        centre = (_TOP + _HEIGHT - _BOTTOM) / 2
        self._parts.append(
            f'<text class="axis" x="14" y="{centre}" text-anchor="middle" transform="rotate(-90 14 '
            f'{centre})">{escape(y_title)}</text>'
        )

    def _x(self, value: float) -> float:
        return _LEFT + (value - self._x0) / (self._x1 - self._x0) * (_WIDTH - _LEFT - _RIGHT)

    def _y(self, value: float) -> float:
        return _HEIGHT - _BOTTOM - (value - self._y0) / (self._y1 - self._y0) * (_HEIGHT - _TOP - _BOTTOM)

    def polyline(self, points: Sequence[tuple[float, float]], colour: str) -> None:
        """A line through `points`."""
        if len(points) > 1:
            path = " ".join(f"{self._x(x):.1f},{self._y(y):.1f}" for x, y in points)
            self._parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{path}"/>')

    def whisker(self, x: float, low: float, high: float, colour: str) -> None:
        """A vertical line from `low` to `high`."""
        at = self._x(x)
        self._parts.append(
            f'<line stroke="{colour}" x1="{at:.1f}" x2="{at:.1f}" y1="{self._y(low):.1f}" y2="{self._y(high):.1f}"/>'
        )

    def marker(self, x: float, y: float, colour: str, says: str) -> None:
        """A dot with a tooltip."""
        self._parts.append(
            f'<circle cx="{self._x(x):.1f}" cy="{self._y(y):.1f}" r="4" '
            f'fill="{colour}"><title>{escape(says)}</title></circle>'
        )

    def done(self) -> str:
        """The complete SVG."""
        return "".join([*self._parts, "</svg>"])
