"""Certificates for tests."""

from __future__ import annotations

from pathlib import Path

from cli.authority import Authority, everybody


def certificates(directory: Path, nodes: int) -> Path:
    """A directory with those of a fleet."""
    authority = Authority(directory)
    for who in everybody(nodes):
        authority.issue(who, 1)
    return directory
