"""The README's tables in Markdown, from a comparison's document. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from claims import E2E, RATE, TPOT, TTFT, curve, users_at_equal_tpot


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.0f}"


_SHOWN: dict[str, tuple[str, Callable[[float], str]]] = {
    "Mean end-to-end latency, s": (E2E, "{:.2f}".format),
    "Mean TTFT, s": (TTFT, "{:.2f}".format),
    "TTFT, p95, s": ("TTFT, p95", "{:.2f}".format),
    "Mean TTFT of returning turns, s": ("TTFT of returning turns, mean", "{:.2f}".format),
    "Mean TPOT, ms": (TPOT, _ms),
    "Requests a second": (RATE, "{:.2f}".format),
}
_VERDICT = {True: "met", False: "**not met**", None: "not shown"}


def markdown(document: Mapping[str, Any]) -> str:
    """One table per figure, targets by loads (medians of the repeats; -: not run), then the claims."""
    users = [point["users"] for point in document["points"]]
    tables = []
    for title, (of, shown) in _SHOWN.items():
        rows = []
        for name in document["targets"]:
            found = curve(document, name, of)
            rows.append(f"| `{name}` | " + " | ".join(shown(found[n]) if n in found else "-" for n in users) + " |")
        tables.append(_table(title, users, rows))
    tables.append(_table("Users of `upbeat` at equal TPOT", users, _equal(document, users)))
    lines = [f"| {c['text']} | {c['wanted']} | {c['found']} | {_VERDICT[c['met']]} |" for c in document["claims"]]
    return "\n\n".join([*tables, "\n".join(["| claim | wanted | found | |", "| --- | --- | --- | --- |", *lines])])


def _table(title: str, users: Sequence[int], rows: Sequence[str]) -> str:
    head = f"| {title} | " + " | ".join(f"{n} users" for n in users) + " |"
    return "\n".join([head, "| --- " * (len(users) + 1) + "|", *rows])


def _equal(document: Mapping[str, Any], users: Sequence[int]) -> list[str]:
    """One row per target. `>`: beyond the measured range. `-`: not run, or ours is slower at every load."""
    found = {(row["target"], row["users"]): row for row in users_at_equal_tpot(document)}

    def cell(name: str, n: int) -> str:
        row = found.get((name, n))
        if row is None or row["ours"] is None:
            return "-"
        return f"{'> ' if row['beyond'] else ''}{row['ours']:.0f} ({row['ours'] / n:.1f} x)"

    return [
        f"| `{name}` | " + " | ".join(cell(name, n) for n in users) + " |"
        for name in document["targets"]
        if name != "upbeat"
    ]
