"""`upbeat explain`: a session's last placements in words, with the scores of the best nodes and where the time went."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

from cli import waterfall

WIDTH = 80
_TERMS = {
    "work_s": "the work that waits there",
    "arrivals_s": "the requests that hints announce there",
    "load_s": "the way of its cache there",
    "leaving_s": "leaving its cache for little",
    "pressure_s": "memory that has to become free there",
    "held_tokens": "the cache that is not there",
}
_WORTH = {
    "behind": "Few hints of its sender come true, so its cache is brought behind that of others.",
    "noted": "Hardly any hint of its sender comes true, so nothing is brought for it.",
}


def lines(data: dict[str, Any]) -> Iterator[str]:
    """Lines of at most 80 columns for an answer of `GET /v1/sessions/{id}/placement`."""
    yield from textwrap.wrap(f"{data['id']}: what was decided for it lately, the latest first", WIDTH)
    for decision in data["decisions"]:
        yield ""
        yield from textwrap.wrap(f"{_title(decision)}, {ago(decision['ago_s'])}: {decision['node']}", WIDTH)
        yield from textwrap.wrap(" ".join(_reasons(decision)), WIDTH, initial_indent="  ", subsequent_indent="  ")
        yield from _table(decision["scores"])
        # Older gateways do not send these.
        yield from waterfall.lines(decision.get("until_first_s"), decision.get("after_s"))


def _title(d: dict[str, Any]) -> str:
    if d["what"] == "turn":
        return f"turn {d['request_id']}"
    return "hint that moved" if d["what"] == "move" else "hint"


def _reasons(d: dict[str, Any]) -> Iterator[str]:
    """Sentences: what was known about the turn, then what decided."""
    node, scores = d["node"], d["scores"]
    if d["what"] == "turn":
        yield from _of_hint(d)
    elif d["what"] == "move":
        yield f"The hint had gone elsewhere before, {_times(d['moves'])}."
    if d["worth"] in _WORTH:
        yield _WORTH[d["worth"]]
    if d["avoided_nodes"]:
        yield f"Nodes that were to be avoided: {d['avoided_nodes']}."
    if d.get("taken"):
        yield f"The gateway sent it to {node} at once, as its hint had chosen it already, so nothing else was weighed."
    elif d["pin_node"]:
        yield f"{node} was asked for by name, so nothing else was weighed."
    elif len(scores) == 1:
        yield f"{node} was the only node to choose from."
    else:
        yield _weighed(scores)
    if d["source_nodes"]:
        yield f"Others that had the session's cache: {', '.join(d['source_nodes'])}."


def _of_hint(d: dict[str, Any]) -> Iterator[str]:
    if not d["hinted"]:
        yield "No hint had announced it."
        return
    moved = f", having moved {_times(d['moves'])}" if d["moves"] else ""
    if d["prefetched_node"] is None:
        yield "A hint had announced it, but nothing was brought for that."
    elif d["prefetched_node"] == d["node"]:
        yield f"A hint had sent its cache there {d['prefetched_s']:.1f} s before{moved}."
    else:
        yield (
            f"A hint had sent its cache to {d['prefetched_node']} {d['prefetched_s']:.1f} s before{moved}, "
            "but here it is done sooner."
        )


def _weighed(scores: list[dict[str, Any]]) -> str:
    best, second = scores[0], scores[1]
    unit = " s" if _in_seconds(scores) else ""
    gap = second["sum"] - best["sum"]
    if abs(gap) < 1e-9:
        return (
            f"{best['node']} and {second['node']} cost the same, {best['sum']:.3g}{unit}; the session's name "
            "decides between equals."
        )
    term = max(best["terms"], key=lambda name: second["terms"][name] - best["terms"][name])
    meant = f", {_TERMS[term]}" if term in _TERMS else ""
    return (
        f"It costs {best['sum']:.3g}{unit} there and {second['sum']:.3g}{unit} on {second['node']}, mostly for "
        f"{term}{meant}."
    )


def _in_seconds(scores: list[dict[str, Any]]) -> bool:
    return all(name.endswith("_s") for name in scores[0]["terms"])


def _table(scores: list[dict[str, Any]]) -> Iterator[str]:
    """The scores in 80 columns: drops the smallest terms, then cuts node names, until they fit."""
    rows = [{**s["terms"], "sum": s["sum"]} for s in scores]
    widths = {name: max(8, len(name), *(len(f"{row[name]:.3g}") for row in rows)) for name in rows[0]}
    longest = max(4, *(len(s["node"]) for s in scores))

    def room() -> int:
        return WIDTH - 2 - sum(width + 2 for width in widths.values())

    while room() < min(longest, 24) and len(widths) > 1:
        del widths[min((n for n in widths if n != "sum"), key=lambda name: max(abs(row[name]) for row in rows))]
    node = min(longest, room())
    yield "  " + "node".ljust(node) + "".join(f"  {name:>{width}}" for name, width in widths.items())
    for s, row in zip(scores, rows, strict=True):
        yield (
            "  "
            + s["node"][:node].ljust(node)
            + "".join(f"  {row[name]:>{width}.3g}" for name, width in widths.items())
        )


def _times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")


def ago(seconds: float) -> str:
    """An age in words."""
    return (
        f"{seconds:.1f} s ago"
        if seconds < 120
        else f"{seconds / 60:.0f} min ago"
        if seconds < 7200
        else f"{seconds / 3600:.0f} h ago"
    )
