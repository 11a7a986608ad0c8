"""The comparison as a picture: four figures against users, one line per target, distinct without colours too."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from claims import E2E, RATE, TPOT, TTFT, curve
from matplotlib.axes import Axes

#: By target: colour (of Okabe and Ito's palette), marker, line.
STYLES: dict[str, tuple[str, str, str]] = {
    "upbeat": ("#0072B2", "o", "-"),
    "sticky": ("#56B4E9", "x", ":"),
    "recompute": ("#000000", "s", "--"),
    "vllm": ("#D55E00", "^", "-."),
    "vllm-sticky": ("#D55E00", "v", ":"),
    "vllm-recompute": ("#777777", "s", ":"),
    "lmcache": ("#009E73", "D", "-."),
    "lmcache-sticky": ("#009E73", "P", ":"),
    "lmcache-disk": ("#E69F00", "d", "--"),
}
PANELS = (
    (E2E, "mean end-to-end latency (s)", 1.0),
    (TTFT, "mean TTFT (s)", 1.0),
    (TPOT, "mean TPOT (ms)", 1000.0),
    (RATE, "requests/s", 1.0),
)


def draw(document: Mapping[str, Any], path: Path) -> None:
    """Write the picture to `path`."""
    with plt.rc_context(
        {
            "font.size": 9,
            "axes.grid": True,
            "grid.color": "#dddddd",
            "axes.spines.top": False,
            "axes.spines.right": False,
        }
    ):
        figure, grid = plt.subplots(2, 2, figsize=(10.5, 7.0), constrained_layout=True)
        for axes, (of, label, factor) in zip(grid.flat, PANELS, strict=True):
            panel(axes, document, of, label, factor)
        handles, names = grid.flat[0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower center", ncols=5, frameon=False)
        figure.savefig(path, dpi=130)
        plt.close(figure)


def panel(axes: Axes, document: Mapping[str, Any], of: str, label: str, factor: float) -> None:
    """Draw one figure of all targets."""
    for name in document["targets"]:
        points = sorted(curve(document, name, of).items())
        if points:
            colour, marker, line = STYLES[name]
            axes.plot(
                [u for u, _ in points],
                [factor * v for _, v in points],
                color=colour,
                marker=marker,
                linestyle=line,
                label=name,
                markersize=5,
            )
    ticks = [int(p["users"]) for p in document["points"]]
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(n) for n in ticks])
    axes.minorticks_off()
    axes.set_xlabel("users")
    axes.set_ylabel(label)
    if of != RATE:
        axes.set_yscale("log")
