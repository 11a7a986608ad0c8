"""The tables of the README, as Markdown, from a comparison's document. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from claims import E2E, NORMALISED, RATE, TPOT, TTFT, curve


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.0f}"


_SHOWN: dict[str, tuple[str, Callable[[float], str]]] = {
    "Mean end-to-end latency, s": (E2E, "{:.2f}".format),
    "Mean TTFT, s": (TTFT, "{:.2f}".format),
    "Mean TTFT of returning turns, s": ("TTFT of returning turns, mean", "{:.2f}".format),
    "Mean TPOT, ms": (TPOT, _ms),
    "Mean normalised latency, ms a token": (NORMALISED, _ms),
    "Requests a second": (RATE, "{:.2f}".format),
}
_VERDICT = {True: "met", False: "**not met**", None: "not shown"}


def markdown(document: Mapping[str, Any]) -> str:
    """A table a figure, targets by loads (medians of the repeats; -: not asked), and the claims."""
    users = [point["users"] for point in document["points"]]
    tables = []
    for title, (of, shown) in _SHOWN.items():
        rows = []
        for name in document["targets"]:
            found = curve(document, name, of)
            rows.append(f"| `{name}` | " + " | ".join(shown(found[n]) if n in found else "-" for n in users) + " |")
        head = f"| {title} | " + " | ".join(f"{n} users" for n in users) + " |"
        tables.append("\n".join([head, "| --- " * (len(users) + 1) + "|", *rows]))
    lines = [f"| {c['text']} | {c['wanted']} | {c['found']} | {_VERDICT[c['met']]} |" for c in document["claims"]]
    return "\n\n".join([*tables, "\n".join(["| claim | wanted | found | |", "| --- | --- | --- | --- |", *lines])])
