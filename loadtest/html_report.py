"""A comparison as one self-contained HTML file: tables, plots, configuration, versions, seeds, machine. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from loadtest.compare.summary import FIGURES, shown, titled
from loadtest.svg import COLOURS, Value, distribution_plot, line_plot

#: Figures plotted over the loads, by their names in `summary.FIGURES`.
_LINES = (
    "end to end, mean",
    "TTFT, mean",
    "TTFT of returning turns, mean",
    "TPOT, mean",
    "normalised latency, mean",
    "requests/s",
    "goodput, requests/s",
)
_STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 1120px; padding: 0 1rem; color: #1a1a1a; }
table { border-collapse: collapse; margin: .6rem 0 1.4rem; }
th, td { padding: .25rem .7rem; border-bottom: 1px solid #ddd; text-align: right; }
th:first-child, td:first-child { text-align: left; }
td.best { font-weight: 700; }
small { color: #666; display: block; }
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(460px, 1fr)); gap: 1rem; }
svg { width: 100%; height: auto; }
svg .title { font: 600 14px system-ui; }
svg .tick, svg .axis { font: 11px system-ui; fill: #444; }
svg .grid { stroke: #e4e4e4; }
.key span { display: inline-block; margin-right: 1.2rem; }
.key i { display: inline-block; width: 14px; height: 14px; margin-right: .4rem; vertical-align: -2px; }
pre { background: #f6f6f6; padding: .8rem; overflow-x: auto; }
.error { color: #a00; white-space: pre-wrap; }
"""


def html_report(document: Mapping[str, Any], title: str) -> str:
    """The report of a `Comparison.document`."""
    targets: Mapping[str, Any] = document["targets"]
    parts = [
        '<!doctype html><html lang="en"><head><meta '
        f'charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style></head><body>',
        f"<h1>{escape(title)}</h1>",
        f"<p>{escape(_origin(document))}</p>",
        '<p class="error">Cut off before its end: what was measured until then.</p>'
        if document.get("interrupted")
        else "",
    ]
    parts += [
        f'<p class="error">{escape(name)}: {escape(t["error"])}</p>' for name, t in targets.items() if t.get("error")
    ]
    parts += [_key(list(targets)), '<div class="plots">', *_plots(document), "</div>"]
    parts += [
        _table(point["label"], targets, document["repeats"], document["baseline"]) for point in document["points"]
    ]
    parts += ["<h2>Where this comes from</h2>", _details(document), "</body></html>\n"]
    return "\n".join(part for part in parts if part)


def _origin(document: Mapping[str, Any]) -> str:
    machine = document["machine"]
    return (
        f"{document['date']}, {machine['cores']} cores of {machine['cpu']}, {machine['memory_gib']} GiB, "
        f"{machine['system']}; {document['repeats']} repeats in turns, seed {document['seed']}"
    )


def _key(names: Sequence[str]) -> str:
    colours = (COLOURS[i % len(COLOURS)] for i in range(len(names)))
    spans = (
        f'<span><i style="background:{colour}"></i>{escape(name)}</span>'
        for name, colour in zip(names, colours, strict=True)
    )
    return f'<p class="key">{"".join(spans)}</p>'


def _plots(document: Mapping[str, Any]) -> list[str]:
    targets, points = document["targets"], document["points"]
    x_title = "users at a time" if points and points[0]["users"] else "times the trace's pace"
    drawn = []
    if len(points) > 1:
        for name, _, unit, _ in FIGURES:
            if name not in _LINES:
                continue
            factor = 1000.0 if unit == "ms" else 1.0
            series = {
                target: [
                    Value(p["load"], *(factor * figure[key] for key in ("median", "min", "max")))
                    for p in points
                    if (figure := found["points"].get(p["label"], {}).get("summary", {}).get(name)) is not None
                ]
                for target, found in targets.items()
            }
            drawn.append(line_plot(name, x_title, unit or name, series))
    for point in points:
        for key, title in (("ttft_s", "TTFT"), ("end_s", "end to end")):
            values = {name: _times(found, point["label"], key) for name, found in targets.items()}
            drawn.append(distribution_plot(f"{title}, {point['label']}", "s", values))
    return [plot for plot in drawn if plot]


def _times(found: Mapping[str, Any], label: str, key: str) -> list[float]:
    """TTFT or end-to-end seconds of every successful request of all runs."""
    outcomes = [
        o
        for run in found["points"].get(label, {}).get("runs", [])
        for o in run.get("outcomes", [])
        if o["error"] is None
    ]
    return [o["ttft_s"] if key == "ttft_s" else o["end_s"] - o["sent_s"] for o in outcomes]


def _table(label: str, targets: Mapping[str, Any], repeats: int, baseline: str) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in targets)
    rows = []
    for name, _, unit, more_is_better in FIGURES:
        found = {t: target["points"].get(label, {}).get("summary", {}).get(name) for t, target in targets.items()}
        known = [figure["median"] for figure in found.values() if figure is not None]
        if not known:
            continue
        best = (max if more_is_better else min)(known) if unit != "count" and len(known) > 1 else None
        cells = []
        for target, figure in found.items():
            if figure is None:
                cells.append("<td>-</td>")
                continue
            spread = (
                f"<small>{shown(figure['min'], unit)} to {shown(figure['max'], unit)}</small>" if repeats > 1 else ""
            )
            ratio = targets[target]["points"][label]["ratios"].get(name)
            times = f"<small>× {ratio['median']:.2f}</small>" if ratio and target != baseline else ""
            marked = ' class="best"' if figure["median"] == best else ""
            cells.append(f"<td{marked}>{shown(figure['median'], unit)}{spread}{times}</td>")
        rows.append(f"<tr><td>{escape(titled(name, unit))}</td>{''.join(cells)}</tr>")
    note = (
        f"<p>Medians of the repeats, least to most, and times {escape(baseline)}'s (the median of the repeats' "
        "ratios).</p>"
    )
    return f"<h2>{escape(label)}</h2><table><tr><th></th>{head}</tr>{''.join(rows)}</table>{note}" if rows else ""


def _details(document: Mapping[str, Any]) -> str:
    told = {
        "workload": document["workload"],
        "targets": {
            name: {"configuration": t["configuration"], "found": t["found"]} for name, t in document["targets"].items()
        },
        "machine": document["machine"],
        "versions": document["versions"],
    }
    return f"<pre>{escape(json.dumps(told, indent=2))}</pre>"
