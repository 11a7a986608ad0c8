"""Figures and verdicts of the questions, for JSON. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from returning import BLOB, COMPUTED, DRAM, LMCACHE, OTHER, OURS_OWN, OWN, SSD, Samples, Setup, hinted
from under_load import Claim

#: A hinted session may take so long beside the server's own cache and a copy of the bytes, in milliseconds.
ALLOWED_MS = 10.0
#: What gateway and sidecar may add to p50 in milliseconds, and which share of throughput must be left.
MOST_ADDED_MS, LEAST_KEPT = 2.0, 0.97
HINTED_OTHER = f"Upbeat, {hinted(OTHER)}"
#: What a node's store must have read for a place, by source.
_SOURCES = {SSD: "ssd", OTHER: "peer", BLOB: "blob"}


def first_tokens(s: Setup) -> dict[str, Any]:
    """Question (a): arms, memcpy's pace, and claims."""
    copy_ms = 1000 * statistics.median(s.copies_s)
    claims = [*_wanted(s, copy_ms), *_checks(s)]
    return {
        "arms": {name: _arm(of) for name, of in s.found.items()},
        "memcpy": {
            "bytes": s.copied_bytes,
            "median_ms": round(copy_ms, 3),
            "ms": [round(1000 * x, 3) for x in s.copies_s],
            "gb_s": round(s.copied_bytes / copy_ms / 1e6, 3),
        },
        "claims": [asdict(claim) for claim in claims],
    }


def _arm(of: Samples) -> dict[str, Any]:
    return {
        "ttft_median_ms": round(_median_ms(of), 3),
        "ttft_ms": [round(1000 * turn.ttft_s, 3) for turn in of.turns],
        "cached_tokens": [turn.cached for turn in of.turns],
        "prompt_tokens": [turn.prompt for turn in of.turns],
        "phases": of.phases,
        "read_bytes": of.read_bytes,
    }


def _median_ms(of: Samples) -> float:
    return 1000 * statistics.median(turn.ttft_s for turn in of.turns)


def _wanted(s: Setup, copy_ms: float) -> list[Claim]:
    limit = f"{hinted(OTHER)}: at most vLLM's own cache + the bytes at memcpy's pace + {ALLOWED_MS:g} ms"
    ahead = f"{hinted(OTHER)}: ahead of LMCache's memory"
    made = []
    ours, own, theirs = (s.found.get(name) for name in (HINTED_OTHER, OWN, LMCACHE))
    if ours is None or own is None:
        made.append(Claim(limit, "not measured", None))
    else:
        most = _median_ms(own) + copy_ms + ALLOWED_MS
        made.append(Claim(limit, f"{_median_ms(ours):.1f} ms, limit {most:.1f} ms", _median_ms(ours) <= most))
    if ours is None or theirs is None:
        made.append(Claim(ahead, "not measured", None))
    else:
        found = f"{_median_ms(ours):.1f} ms, LMCache {_median_ms(theirs):.1f} ms"
        made.append(Claim(ahead, found, _median_ms(ours) < _median_ms(theirs)))
    return made


def _checks(s: Setup) -> list[Claim]:
    """What shows that the arms are what their names say."""
    cached = {name: [turn.cached for turn in of.turns] for name, of in s.found.items()}
    whole = {name: n for name, n in cached.items() if name != COMPUTED}
    made = [
        Claim(
            "every arm but the recomputed one had all seen tokens cached",
            ", ".join(f"{name} {n}" for name, n in whole.items() if set(n) != {s.tokens}) or f"{s.tokens}",
            all(set(n) == {s.tokens} for n in whole.values()),
        )
    ]
    if COMPUTED in cached:
        made.append(Claim("recomputed prompts were not cached", str(max(cached[COMPUTED])), not any(cached[COMPUTED])))
    for place in (OURS_OWN, DRAM, SSD, OTHER, BLOB):
        if (name := f"Upbeat, {place}") in s.found:
            made.append(_read(s, place, name))
        if (name := f"Upbeat, {hinted(place)}") in s.found:
            made.append(_read_ahead(s, name))
    return made


def _read(s: Setup, place: str, name: str) -> Claim:
    """An unhinted turn's bytes came from the arm's source, and nothing from another tier."""
    source, reads = _SOURCES.get(place), s.found[name].read_bytes
    # The other node's store reads its SSD; ours then reads the other node ("peer").
    others = [x for x in ("ssd", "peer", "blob") if x != source]
    least = 0.9 * s.copied_bytes if source else 0
    met = all(read.get(source or "", 0) >= least and not any(read.get(x) for x in others) for read in reads)
    return Claim(f"{name}: read from {source or 'no lower tier'}", str(reads[-1]), met)


def _read_ahead(s: Setup, name: str) -> Claim:
    """When a hinted request came, all was in DRAM."""
    left = [sum(read.get(source, 0) for source in ("ssd", "peer", "blob")) for read in s.found[name].read_bytes]
    return Claim(f"{name}: all was in DRAM when the request came", f"{max(left)} bytes were not", not any(left))


def added(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Question (c)'s claims."""
    made = []
    for beside, of in found["added"].items():
        made.append(
            Claim(
                f"p50 added {beside} under {MOST_ADDED_MS:g} ms",
                f"{of['p50_ms']:.2f} ms (p99: {of['p99_ms']:.2f} ms)",
                of["p50_ms"] < MOST_ADDED_MS,
            )
        )
        low, high = of["throughput_kept_range"]
        made.append(
            Claim(
                f"throughput kept {beside} over {100 * LEAST_KEPT:.0f} %",
                f"{100 * of['throughput_kept']:.1f} % ({100 * low:.1f} to {100 * high:.1f} %)",
                of["throughput_kept"] > LEAST_KEPT,
            )
        )
    return [asdict(claim) for claim in made]
