"""Allows common flags before the command's name: `upbeat --url URL status`."""

from __future__ import annotations

from collections.abc import Sequence

#: Number of words after each flag.
_ANYWHERE = {"--url": 1, "--key": 1, "--json": 0}


def command_first(words: Sequence[str]) -> list[str]:
    """`words` with these flags moved behind the command; unchanged if no command follows."""
    at = 0
    while at < len(words) and (flag := words[at].partition("=")[0]) in _ANYWHERE:
        at += 1 if "=" in words[at] else 1 + _ANYWHERE[flag]
    return [*words[at:], *words[:at]] if at < len(words) else list(words)
