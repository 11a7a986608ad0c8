"""Flags that every asking command has may stand before the command's name, too: `upbeat --url URL status`."""

from __future__ import annotations

from collections.abc import Sequence

#: By flag, how many words follow it.
_ANYWHERE = {"--url": 1, "--key": 1, "--json": 0}


def command_first(words: Sequence[str]) -> list[str]:
    """`words` with such flags behind the command; as they are where no command follows. Whether the command takes them is for it to say."""
    at = 0
    while at < len(words) and (flag := words[at].partition("=")[0]) in _ANYWHERE:
        at += 1 if "=" in words[at] else 1 + _ANYWHERE[flag]
    return [*words[at:], *words[:at]] if at < len(words) else list(words)
