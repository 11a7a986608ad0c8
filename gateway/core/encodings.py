"""Chooses a file's encoding by Accept-Encoding (RFC 9110, 12.5.3), and compares entity tags."""

from __future__ import annotations

from collections.abc import Collection

IDENTITY = "identity"


def choose(accepted: str, available: Collection[str]) -> str:
    """One of `available`, the best first, or `identity`. accepted: the header's value; empty: only identity.

    Equal weights: the first of `available`. A client that refuses everything gets identity.
    """
    weights = _weights(accepted)
    others = weights.get("*", 0.0)
    best, most = IDENTITY, 0.0
    for name in available:
        weight = weights.get(name, others)
        if weight > most:
            best, most = name, weight
    return IDENTITY if weights.get(IDENTITY, 0.0) > most else best


def is_known(if_none_match: str, tag: str) -> bool:
    """Whether If-None-Match names this entity tag, or `*`. Weak tags are compared as strong ones."""
    return any(named.strip().removeprefix("W/") in (tag, "*") for named in if_none_match.split(","))


def _weights(accepted: str) -> dict[str, float]:
    """Weights by encoding; unreadable ones are 0."""
    found = {}
    for part in accepted.lower().split(","):
        name, *parameters = (piece.strip() for piece in part.split(";"))
        weight = 1.0
        for parameter in parameters:
            key, _, value = parameter.partition("=")
            if key.strip() == "q":
                weight = _quality(value.strip())
        if name:
            found["gzip" if name == "x-gzip" else name] = weight
    return found


def _quality(text: str) -> float:
    if not text.replace(".", "", 1).isdecimal() or not text.isascii():
        return 0.0
    return min(float(text), 1.0)
