"""Draws a dashboard from the results of its queries. Not Grafana's own picture: no registry has Grafana."""

from __future__ import annotations

import math
import re
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from deploy.monitoring.panels import Board, Panel
from deploy.monitoring.prometheus import Prometheus, filled_in

_ACROSS = 3
#: Lines that a legend names; the largest.
_MOST_NAMED = 6
_BYTES = ("bytes", "Bps")


def draw(board: Board, prometheus: Prometheus, from_s: float, to_s: float, path: Path) -> None:
    """Write a PNG of the board's panels, each from `from_s` to `to_s`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = -(-len(board.panels) // _ACROSS)
    figure, axes = plt.subplots(rows, _ACROSS, figsize=(13.5, 2.7 * rows), squeeze=False)
    for place in range(rows * _ACROSS):
        ax = axes[place // _ACROSS][place % _ACROSS]
        if place < len(board.panels):
            _panel(ax, board.panels[place], prometheus, from_s, to_s)
        else:
            ax.axis("off")
    figure.suptitle(board.title, x=0.01, ha="left", weight="bold")
    figure.text(0.99, 0.005, "drawn with matplotlib from the panels' queries", ha="right", fontsize=6, color="gray")
    figure.tight_layout(rect=(0, 0.01, 1, 0.99))
    figure.savefig(path, dpi=75)
    plt.close(figure)


def _panel(ax: Axes, panel: Panel, prometheus: Prometheus, from_s: float, to_s: float) -> None:
    lines: list[tuple[str, list[float], list[float]]] = []
    for query in panel.queries:
        for labels, points in prometheus.lines(filled_in(query.expr), from_s, to_s):
            name = re.sub(r"\{\{(\w+)\}\}", lambda found, of=labels: of.get(found[1], ""), query.legend).strip()
            values = [value if math.isfinite(value) else math.nan for _, value in points]
            lines.append((name or "(none)", [at - from_s for at, _ in points], values))
    lines.sort(key=lambda line: -max((v for v in line[2] if v == v), default=0.0))
    if panel.stacked:
        ends = sorted({at for _, times, _ in lines for at in times})
        levels = [[dict(zip(times, values, strict=True)).get(at, 0.0) for at in ends] for _, times, values in lines]
        ax.stackplot(ends, [[0.0 if v != v else v for v in level] for level in levels], alpha=0.7)
        handles = ax.collections
    else:
        handles = [ax.plot(times, values, linewidth=1)[0] for _, times, values in lines]
    named = list(zip(handles, (name for name, _, _ in lines), strict=True))[:_MOST_NAMED]
    more = [f"{len(lines) - len(named)} more"] if len(lines) > len(named) else []
    labels_ = [name for _, name in named] + more
    marks = [handle for handle, _ in named] + [plt.Line2D([], [], linestyle="none") for _ in more]
    ax.legend(marks, labels_, fontsize=5.5, loc="upper left", frameon=False, ncols=2)
    ax.set_title(panel.title, fontsize=8, loc="left")
    ax.tick_params(labelsize=6)
    ax.set_ylim(0, max(ax.get_ylim()[1], 1e-9) * 1.35)  # the legend's place
    ax.set_xlim(0, to_s - from_s)
    if panel.unit in _BYTES:
        ax.yaxis.set_major_formatter(
            FuncFormatter(lambda value, _: _si(value) + ("B/s" if panel.unit == "Bps" else "B"))
        )
    elif panel.unit == "percentunit":
        ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
    elif panel.unit == "s":
        ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} s"))


def _si(value: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g} {letter}"
    return f"{value:g} "
