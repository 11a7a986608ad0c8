"""What a dashboard is made of, and Grafana's JSON of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_WIDTH, _HEIGHT, _COLUMNS = 8, 8, 24
#: Selectors: of a model, and of a node's services.
OF_MODEL, OF_NODE = 'model=~"$model"', 'node=~"$node"'


@dataclass(frozen=True, slots=True)
class Query:
    """PromQL, and what a line is called: text, with a label's value in double braces."""

    expr: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """Lines over time. unit: Grafana's. stacked: areas that add up."""

    title: str
    text: str
    unit: str
    queries: tuple[Query, ...]
    stacked: bool = False


@dataclass(frozen=True, slots=True)
class Board:
    """A dashboard. name: of its file."""

    name: str
    title: str
    text: str
    panels: tuple[Panel, ...]


def rate(metric: str, by: str = "", selector: str = "") -> str:
    """PromQL: the sum of a counter's rates, by these labels. selector: which series."""
    return f"sum{f' by ({by})' if by else ''} (rate({metric}{{{selector}}}[$__rate_interval]))"


def panel(title: str, text: str, unit: str, *queries: tuple[str, str], stacked: bool = False) -> Panel:
    """A panel of these (PromQL, legend)."""
    return Panel(title, text, unit, tuple(Query(*each) for each in queries), stacked)


def quantiles(title: str, text: str, metric: str, selector: str = "", by: str = "") -> Panel:
    """Median, p90 and p99 of a histogram in seconds. by: further labels, each after ", "."""
    return panel(
        title,
        text,
        "s",
        *(
            (
                f"histogram_quantile({q}, {rate(f'{metric}_bucket', f'le{by}', selector)})",
                f"{name} {{{{model}}}}".strip(),
            )
            for q, name in (("0.5", "p50"), ("0.9", "p90"), ("0.99", "p99"))
        ),
    )


def _source() -> dict[str, str]:
    return {"type": "prometheus", "uid": "${datasource}"}


def _panels(board: Board) -> Iterator[dict[str, Any]]:
    for place, panel in enumerate(board.panels):
        across = _COLUMNS // _WIDTH
        custom: dict[str, Any] = {"lineWidth": 1, "fillOpacity": 10, "showPoints": "never", "spanNulls": False}
        if panel.stacked:
            custom |= {"stacking": {"mode": "normal", "group": "A"}, "fillOpacity": 40}
        yield {
            "id": place + 1,
            "type": "timeseries",
            "title": panel.title,
            "description": panel.text,
            "datasource": _source(),
            "gridPos": {"h": _HEIGHT, "w": _WIDTH, "x": place % across * _WIDTH, "y": place // across * _HEIGHT},
            "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": custom}, "overrides": []},
            "options": {
                "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
                "tooltip": {"mode": "multi", "sort": "desc"},
            },
            "targets": [
                {
                    "refId": chr(ord("A") + number),
                    "datasource": _source(),
                    "expr": query.expr,
                    "legendFormat": query.legend,
                    "range": True,
                }
                for number, query in enumerate(panel.queries)
            ],
        }


def _variable(name: str, values: str) -> dict[str, Any]:
    return {
        "name": name,
        "label": name,
        "type": "query",
        "datasource": _source(),
        "definition": values,
        "query": {"query": values, "refId": name},
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
        "refresh": 2,
        "sort": 1,
    }


def grafana(board: Board) -> dict[str, Any]:
    """The dashboard as Grafana imports it."""
    return {
        "uid": f"upbeat-{board.name}",
        "title": board.title,
        "description": board.text,
        "tags": ["upbeat"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "links": [
            {
                "type": "dashboards",
                "title": "Upbeat",
                "tags": ["upbeat"],
                "asDropdown": True,
                "includeVars": True,
                "keepTime": True,
            }
        ],
        "templating": {
            "list": [
                {
                    "name": "datasource",
                    "label": "data source",
                    "type": "datasource",
                    "query": "prometheus",
                    "refresh": 1,
                },
                _variable("model", "label_values(upbeat_gateway_tokens_total, model)"),
                _variable("node", "label_values(upbeat_worker_model_state, node)"),
            ]
        },
        "panels": list(_panels(board)),
    }


def text_of(board: Board) -> str:
    """The file's content."""
    return json.dumps(grafana(board), indent=1) + "\n"
