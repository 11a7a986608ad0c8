"""What a figure's curves say about each other: where two of them cross, and how many users of ours are served equally
fast."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any


def crossings(rows: Sequence[dict[str, Any]], what: str = "normalised_s") -> list[dict[str, Any]]:
    """Pairs of systems whose curves cross by over 5 %, with the loads between which they do."""
    users = sorted({r["users"] for r in rows})
    at = {(r["system"], r["users"]): r[what] for r in rows}
    names = list(dict.fromkeys(r["system"] for r in rows))
    found = []
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            for low, high in pairwise(users):
                before, after = at[a, low] / at[b, low] - 1, at[a, high] / at[b, high] - 1
                if before * after < 0 and max(abs(before), abs(after)) > 0.05:
                    faster = a if after < 0 else b
                    found.append(
                        {"between_users": [low, high], "faster_after": faster, "faster_before": b if faster == a else a}
                    )
    return found


def at_equal(rows: Sequence[dict[str, Any]], what: str = "tpot_s") -> list[dict[str, Any]]:
    """For each other system and load: our users at the same value, interpolated between loads."""
    ours = sorted((r["users"], r[what]) for r in rows if r["system"] == "balanced")
    found = []
    for r in rows:
        if r["system"] == "balanced":
            continue
        reached = [(u, v) for u, v in ours if v <= r[what]]
        if not reached:
            continue
        users: float = reached[-1][0]
        beyond = next(((u, v) for u, v in ours if u > users), None)
        if beyond is not None:
            low = reached[-1][1]
            users += (r[what] - low) / (beyond[1] - low) * (beyond[0] - users)
        found.append(
            {
                "system": r["system"],
                "users": r["users"],
                what: r[what],
                "ours": round(users),
                "at_least": beyond is None,
            }
        )
    return found
