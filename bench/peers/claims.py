"""The claims of the comparison, each with what was wanted and found. Pure: reads a comparison's document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

#: Allowed ratio to the best peer; required latency ratio where recompute saturates; required ratio of users.
MARGIN, TIMES_RECOMPUTE, TIMES_USERS = 1.05, 2.4, 4.0
E2E, TTFT, TPOT = "end to end, mean", "TTFT, mean", "TPOT, mean"
RATE = "requests/s"
#: Targets with our engine. The others are peers.
OURS = ("upbeat", "sticky", "recompute")
#: Targets without any cache.
RECOMPUTING = ("recompute", "vllm-recompute")
#: A system saturates at the lowest load that reaches this share of its highest request rate.
_SATURATED = 0.9


@dataclass(frozen=True, slots=True)
class Claim:
    """met: None if the loads that were run do not decide."""

    text: str
    wanted: str
    found: str
    met: bool | None

    @property
    def line(self) -> str:
        """The claim as it is printed."""
        verdict = {True: "met", False: "NOT MET", None: "not shown"}[self.met]
        return f"{self.text}: {self.found} (wanted: {self.wanted}): {verdict}"


def curve(document: Mapping[str, Any], name: str, of: str) -> dict[int, float]:
    """Medians of the figure `of`, by users, at the loads that this target ran."""
    points = document["targets"].get(name, {}).get("points", {})
    found = {}
    for point in document["points"]:
        figure = points.get(point["label"], {}).get("summary", {}).get(of)
        if figure is not None:
            found[int(point["users"])] = figure["median"]
    return found


def claims(document: Mapping[str, Any]) -> list[Claim]:
    """All claims, the headline first."""
    return [*against_recompute(document), *against_peers(document)]


def saturation(document: Mapping[str, Any], name: str) -> int | None:
    """The users at which a target saturates; None if it was not run."""
    rate = curve(document, name, RATE)
    most = max(rate.values(), default=0.0)
    return min((users for users, value in rate.items() if value >= _SATURATED * most), default=None)


def against_recompute(document: Mapping[str, Any]) -> list[Claim]:
    """Two claims for each of RECOMPUTING: latency where it saturates, and our users at its TPOT.

    Users are compared at the load with the highest ratio (SYMPHONY, figure 11): beyond saturation, TPOT of an engine
    that bounds its steps is that bound. The paper compares with vLLM (section 4.1).
    """
    made = []
    equal = [row for row in users_at_equal_tpot(document) if row["ours"] is not None]
    for name in RECOMPUTING:
        ours, theirs, users = curve(document, "upbeat", E2E), curve(document, name, E2E), saturation(document, name)
        if users is None or users not in ours:
            continue
        ratio = theirs[users] / ours[users]
        text = f"{users} users, where {name} saturates, its mean end-to-end latency over ours"
        found = f"{theirs[users]:.2f} s against {ours[users]:.2f} s, {ratio:.2f} x"
        made.append(Claim(text, f"at least {TIMES_RECOMPUTE} x", found, ratio >= TIMES_RECOMPUTE))
        row = max(
            (row for row in equal if row["target"] == name), key=lambda row: row["ours"] / row["users"], default=None
        )
        if row is not None:
            found = f"{told(row)} for its {row['users']}, at {1000 * row['tpot_s']:.1f} ms"
            met = row["ours"] / row["users"] >= TIMES_USERS
            text = f"users of ours at the TPOT of {name}, at its load where that is most"
            made.append(Claim(text, f"at least {TIMES_USERS:g} x", found, None if not met and row["beyond"] else met))
    return made


def against_peers(document: Mapping[str, Any]) -> list[Claim]:
    """A claim for each load and figure: ours against the best peer."""
    made = []
    peers = [name for name in document["targets"] if name not in OURS]
    curves = {(name, of): curve(document, name, of) for name in ("upbeat", *peers) for of in (E2E, TTFT, TPOT)}
    for point in document["points"]:
        users = int(point["users"])
        for of in (E2E, TTFT, TPOT):
            ours = curves["upbeat", of].get(users)
            theirs = {name: curves[name, of][users] for name in peers if users in curves[name, of]}
            if ours is None or not theirs:
                continue
            best = min(theirs, key=theirs.__getitem__)
            over = ours / theirs[best] - 1
            more = "over" if over > 0 else "under"
            found = (
                f"{1000 * ours:.1f} ms, {abs(over):.1%} {more} the best peer's ({best}, {1000 * theirs[best]:.1f} ms)"
            )
            made.append(Claim(f"{users} users, {of}", "at most 5 % over", found, ours <= MARGIN * theirs[best]))
    return made


def users_at_equal_tpot(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """For each other target and load, our users at the same TPOT, interpolated between loads.

    In each row, `ours` is None if ours is slower at every load; `beyond` is true if more than the highest load fit.
    """
    ours = sorted(curve(document, "upbeat", TPOT).items())
    rows: list[dict[str, Any]] = []
    for name in document["targets"]:
        if name != "upbeat":
            for users, tpot_s in curve(document, name, TPOT).items():
                reached, beyond = users_at(ours, tpot_s)
                rows.append({"target": name, "users": users, "tpot_s": tpot_s, "ours": reached, "beyond": beyond})
    return rows


def users_at(ours: Sequence[tuple[int, float]], value: float) -> tuple[float | None, bool]:
    """(most users at which the curve `ours` is at most `value`, whether the curve ends before it passes `value`).

    Linear between points; None if every point is above.
    """
    below = [i for i, (_, v) in enumerate(ours) if v <= value]
    if not below:
        return None, False
    users, low = ours[below[-1]]
    if below[-1] + 1 == len(ours):
        return float(users), True
    more, high = ours[below[-1] + 1]
    return round(users + (value - low) / (high - low) * (more - users), 1), False


def told(row: Mapping[str, Any]) -> str:
    """A row of `users_at_equal_tpot` in words."""
    if row["ours"] is None:
        return "fewer than were run"
    times = f"{row['ours']:g} ({row['ours'] / row['users']:.1f} x)"
    return f"at least {times}, beyond the measured range," if row["beyond"] else times
