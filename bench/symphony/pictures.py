"""Draws the figures. Each system keeps its colour, marker and line, distinct in grey too (Okabe and Ito's palette)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

#: By system: its name, colour, marker and line.
STYLES: dict[str, tuple[str, str, str, str]] = {
    "balanced": ("Upbeat", "#0072B2", "o", "-"),
    "recompute": ("vLLM (recompute)", "#000000", "s", "--"),
    "infercept": ("InferCept", "#D55E00", "^", "-."),
    "infercept-migration": ("InferCept, migrating", "#CC79A7", "P", ":"),
    "llumnix": ("Llumnix", "#E69F00", "v", ":"),
    "llumnix-infercept": ("Llumnix + InferCept", "#009E73", "D", "-."),
    "parrot": ("Parrot", "#E69F00", "P", "--"),
    "lmcache": ("LMCache", "#D55E00", "^", "-."),
    "balanced, remote tier": ("Upbeat, remote tier", "#56B4E9", "v", ":"),
    "balanced, remote tier, codec": ("Upbeat, remote tier, codec", "#009E73", "D", "--"),
    "balanced, all tiers": ("Upbeat, all tiers", "#0072B2", "o", "-"),
    "no-cooperative": ("no cooperative memory", "#D55E00", "^", "-."),
    "layer-priority": ("layer priority", "#E69F00", "v", ":"),
    "no-layerwise": ("no layer-wise loading", "#009E73", "D", "--"),
    "balanced-no-hints": ("no hints", "#CC79A7", "P", "--"),
    "no balancing": ("no balancing (sticky), no hints", "#000000", "s", "--"),
    "sticky": ("sticky, all tiers", "#56B4E9", "x", ":"),
    "sticky-hints": ("sticky, hints", "#56B4E9", "v", "-."),
    "prefix-caching": ("vLLM, prefix caching", "#888888", "s", ":"),
    "infercept-ssd": ("InferCept, SSD", "#D55E00", "x", ":"),
    "lmcache-ssd": ("LMCache, SSD", "#E69F00", "D", "-."),
}
WIDE, NARROW, HIGH = 9.6, 5.4, 3.4


def draw(name: str, found: dict[str, Any], path: Path, dots_per_inch: int = 130) -> None:
    """Draw a figure's data and write the picture to `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with plt.rc_context(
        {
            "font.size": 9, "axes.grid": True, "grid.color": "#dddddd", "grid.linewidth": 0.6, "axes.spines.top": False,
            "axes.spines.right": False, "axes.axisbelow": True, "legend.frameon": False, "lines.linewidth": 1.6,
            "lines.markersize": 5,
            "figure.constrained_layout.use": True, "axes.titlesize": 9, "axes.titleweight": "bold",
        }
    ):  # fmt: skip
        figure = DRAWN[name.removesuffix("-busy")](found)
        figure.savefig(path, dpi=dots_per_inch)
        plt.close(figure)


def curves(
    axes: Axes, rows: Sequence[dict[str, Any]], what: str, factor: float = 1.0, label: str = "", *, log: bool = False
) -> None:
    """Draw a line per system against users."""
    for name in dict.fromkeys(r["system"] for r in rows):
        points = [(r["users"], factor * r[what]) for r in rows if r["system"] == name and r[what] is not None]
        title, colour, marker, line = STYLES[name]
        axes.plot(*zip(*points, strict=True), color=colour, marker=marker, linestyle=line, label=title)
    axes.set_xlabel("users")
    axes.set_xticks(sorted({r["users"] for r in rows}))
    axes.set_ylabel(label)
    if log:
        logarithmic(axes)
    else:
        axes.set_ylim(bottom=0)


def logarithmic(axes: Axes) -> None:
    """Set a logarithmic y axis with plain numbers."""
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def legend(figure: Figure, axes: Axes, columns: int = 3) -> None:
    """Draw one legend above all panels."""
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=columns)


def panels(count: int, height: float = HIGH) -> tuple[Figure, list[Axes]]:
    """Panels side by side."""
    figure, axes = plt.subplots(1, count, figsize=(NARROW if count == 1 else WIDE, height))
    return figure, [axes] if count == 1 else list(axes)


def against_users(found: dict[str, Any]) -> Figure:
    figure, axes = plt.subplots(2, 2, figsize=(WIDE, 6.2))
    flat = list(axes.flat)
    curves(flat[0], found["rows"], "tpot_s", 1000, "TPOT, mean (ms)")
    curves(flat[1], found["rows"], "ttft_s", 1, "TTFT, mean (s)", log=True)
    curves(flat[2], found["rows"], "requests_per_s", 1, "requests/s")
    curves(flat[3], found["rows"], "normalised_s", 1000, "normalised latency, mean (ms a token)", log=True)
    legend(figure, flat[0], 5)
    return figure


def _two(found: dict[str, Any]) -> Figure:
    figure, axes = panels(2, 3.8)
    curves(axes[0], found["rows"], "normalised_s", 1000, "normalised latency, mean (ms a token)")
    curves(axes[1], found["rows"], "ttft_s", 1, "TTFT, mean (s)", log=True)
    legend(figure, axes[0], 3 if len(axes[0].lines) > 4 else 2)
    return figure


def figure_1(found: dict[str, Any]) -> Figure:
    figure, axes = panels(2)
    top = max(max(s["most"]) for s in found["systems"].values()) * 1.3
    for ax, (name, series) in zip(axes, found["systems"].items(), strict=True):
        title, colour, _, _ = STYLES[name]
        times = [found["every_s"] * n for n in range(len(series["most"]))]
        ax.fill_between(
            times,
            series["least"],
            series["most"],
            color=colour,
            alpha=0.25,
            linewidth=0,
            label="least to most loaded GPU",
        )
        ax.plot(times, series["mean"], color=colour, label="mean of the GPUs")
        ax.set(title=title, xlabel="time (s)", ylabel="requests on a GPU", ylim=(0, top))
        ax.legend(loc="upper left")
    return figure


def figure_2(found: dict[str, Any]) -> Figure:
    figure, (ax,) = panels(1)
    at = [r["requests_at_a_time"] for r in found["rows"]]
    ax.plot(
        at,
        [1000 * r["tpot_s"] for r in found["rows"]],
        color="#000000",
        marker="s",
        label="served, each new prompt computed",
    )
    ax.plot(
        at,
        [1000 * r["decode_step_s"] for r in found["rows"]],
        color="#0072B2",
        marker="o",
        linestyle=":",
        label="decode only, 2,200 tokens each",
    )
    ax.set_xscale("log", base=2)
    ax.set_xticks(at, [str(n) for n in at])
    ax.set(xlabel="requests at a time on one GPU", ylabel="TPOT, mean (ms)")
    ax.set_ylim(bottom=0)
    ax.legend()
    return figure


def figure_4(found: dict[str, Any]) -> Figure:
    figure, (ax,) = panels(1)
    rows = found["rows"]
    kinds = (
        ("recompute_s", "computed again", "#000000", "s", "--"),
        ("swap_s", "swapped in, then computed", "#D55E00", "^", "-."),
        ("layerwise_s", "layers load while others compute", "#009E73", "D", ":"),
        ("already_there_s", "in HBM before the request came", "#0072B2", "o", "-"),
    )
    for what, title, colour, marker, line in kinds:
        ax.plot(
            [r["history_tokens"] for r in rows],
            [r[what] for r in rows],
            color=colour,
            marker=marker,
            linestyle=line,
            label=title,
        )
    ax.set_xscale("log", base=2)
    logarithmic(ax)
    ax.set_xticks([r["history_tokens"] for r in rows], [f"{r['history_tokens']:,}" for r in rows])
    ax.set(xlabel="tokens of history", ylabel="time to first token (s)")
    ax.legend()
    return figure


def figure_5(found: dict[str, Any]) -> Figure:
    figure, (ax,) = panels(1)
    ax.bar([r["turn"] for r in found["rows"]], [100 * r["wasted_share"] for r in found["rows"]], color="#0072B2")
    ax.axhline(50, color="#D55E00", linestyle="--", linewidth=1.2, label="half of the prompt")
    ax.set_xticks([r["turn"] for r in found["rows"] if r["turn"] % 2 or r["turn"] == 2])
    ax.set(xlabel="turn of the conversation", ylabel="prompt tokens computed before (%)", ylim=(0, 112))
    ax.legend(loc="upper left")
    ax.xaxis.grid(False)
    return figure


def figure_6(found: dict[str, Any]) -> Figure:
    figure, axes = panels(2, 3.8)
    for ax, model, title in zip(axes, ("8b", "13b"), ("Llama-3.1-8B", "Llama-2-13B"), strict=True):
        curves(ax, found[model], "normalised_s", 1000, "normalised latency, mean (ms a token)")
        ax.set_title(title)
    legend(figure, axes[0], 4)
    return figure


def figure_15(found: dict[str, Any]) -> Figure:
    figure, axes = panels(2)
    top = max(its["peak_to_median"]["whole_run"] for its in found["systems"].values()) * 1.12
    for ax, model, title in zip(axes, ("8b", "13b"), ("Llama-3.1-8B", "Llama-2-13B"), strict=True):
        shown = {k.partition(" ")[2]: v for k, v in found["systems"].items() if k.startswith(f"{model} ")}
        for at, (name, its) in enumerate(shown.items()):
            _, colour, _, _ = STYLES[name]
            ax.bar(at, its["peak_to_median"]["whole_run"], 0.6, color=colour)
            ax.annotate(
                f"{its['peak_to_median']['whole_run']:.1f}",
                (at, its["peak_to_median"]["whole_run"]),
                ha="center",
                va="bottom",
            )
        ax.set_xticks(range(len(shown)), [STYLES[n][0].replace(" ", "\n", 1) for n in shown])
        ax.set(title=title, ylabel="peak load over median load (requests)", ylim=(0, top))
        ax.xaxis.grid(False)
    return figure


def bars(ax: Axes, groups: Sequence[str], series: dict[str, Sequence[float]], label: str) -> None:
    """Draw groups of bars, one bar per system."""
    width = 0.8 / len(series)
    for n, (name, values) in enumerate(series.items()):
        title, colour, _, _ = STYLES[name]
        ax.bar(
            [g + (n - (len(series) - 1) / 2) * width for g in range(len(groups))],
            values,
            width * 0.92,
            color=colour,
            label=title,
        )
    ax.set_xticks(range(len(groups)), groups)
    ax.set_ylabel(label)
    ax.xaxis.grid(False)


def figure_16(found: dict[str, Any]) -> Figure:
    teams = sorted({r["teams"] for r in found["rows"]})
    figure, axes = panels(len(teams), 3.8)
    for ax, count in zip(axes, teams, strict=True):
        rows = [r for r in found["rows"] if r["teams"] == count]
        names = list(dict.fromkeys(r["system"] for r in rows))
        files = [f"{n} files" for n in sorted({r["files"] for r in rows})]
        bars(
            ax,
            files,
            {s: [r["project_mean_s"] for r in rows if r["system"] == s] for s in names},
            "seconds a project, mean",
        )
        ax.set_title(f"{count} teams at a time")
    legend(figure, axes[0], 5)
    return figure


def figure_18(found: dict[str, Any]) -> Figure:
    figure, axes = panels(2, 3.8)  # answers are one token, so latency is TTFT
    curves(axes[0], found["rows"], "ttft_s", 1, "TTFT, mean (s)", log=True)
    curves(axes[1], found["rows"], "ttft_p99_s", 1, "TTFT, 99th percentile (s)", log=True)
    legend(figure, axes[0], 5)
    return figure


def figure_19(found: dict[str, Any]) -> Figure:
    figure, axes = panels(2)
    rows = found["rows"]
    for ax, what, factor, label in (
        (axes[0], "normalised_s", 1000, "normalised latency, mean (ms a token)"),
        (axes[1], "ttft_s", 1, "TTFT, mean (s)"),
    ):
        ax.plot(
            [100 * r["missed"] for r in rows],
            [factor * r[what] for r in rows],
            color="#0072B2",
            marker="o",
            label="Upbeat",
        )
        for r in found["stateful"]:
            title, colour, _, line = STYLES[r["system"]]
            ax.axhline(factor * r[what], color=colour, linestyle=line, label=f"{title}, no hints")
        ax.set(xlabel="requests without a hint (%)", ylabel=label)
        ax.set_ylim(0, 1.12 * factor * max(r[what] for r in (*rows, *found["stateful"])))
    legend(figure, axes[0])
    return figure


def figure_20(found: dict[str, Any]) -> Figure:
    figure, axes = panels(2)
    rows = found["rows"]
    at = [100 * r["spurious"] for r in rows]
    axes[0].plot(at, [r["output_tokens_per_s"] for r in rows], color="#0072B2", marker="o")
    axes[0].set(xlabel="hints for nothing (% of the requests)", ylabel="output tokens/s")
    axes[1].plot(at, [1000 * r["normalised_s"] for r in rows], color="#0072B2", marker="o")
    axes[1].set(xlabel="hints for nothing (% of the requests)", ylabel="normalised latency, mean (ms a token)")
    axes[0].set_ylim(0, 1.12 * max(r["output_tokens_per_s"] for r in rows))
    axes[1].set_ylim(0, 1.12 * 1000 * max(r["normalised_s"] for r in rows))
    return figure


def figure_21(found: dict[str, Any]) -> Figure:
    figure, axes = panels(2, 3.8)
    shares, kinds = sorted({r["share"] for r in found["rows"]}), ("prioritised", "regular")
    series = [(system, who) for system in ("recompute", "balanced") for who in kinds]
    for ax, what, factor, label in (
        (axes[0], "tpot_s", 1000, "TPOT, mean (ms)"),
        (axes[1], "ttft_s", 1, "TTFT, mean (s)"),
    ):
        for n, (system, who) in enumerate(series):
            title, colour, _, _ = STYLES[system]
            heights = [factor * r[what] for r in found["rows"] if (r["system"], r["who"]) == (system, who)]
            at = [g + (n - 1.5) * 0.2 for g in range(len(shares))]
            pale = 0.45 if who == "regular" else 1.0
            ax.bar(at, heights, 0.18, color=colour, alpha=pale, label=f"{title}, {who} sessions")
        ax.set_xticks(range(len(shares)), [f"{share:.0%}" for share in shares])
        ax.set(xlabel="share of prioritised sessions", ylabel=label)
        ax.xaxis.grid(False)
    legend(figure, axes[0], 2)
    return figure


DRAWN: dict[str, Callable[[dict[str, Any]], Figure]] = {
    "1": figure_1, "2": figure_2, "4": figure_4, "5": figure_5, "6": figure_6, "11": against_users, "12": against_users,
    "13": against_users,
    "14": _two, "15": figure_15, "16": figure_16, "17": _two, "18": figure_18, "19": figure_19, "20": figure_20,
    "21": figure_21, "arms-8b": against_users, "arms-13b": against_users,
}  # fmt: skip
