"""The peers' environments, installed once under .cache/ by pip with pinned versions.

vLLM's is shared with bench/engine, LMCache's with bench/returning_session_tiers.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "engine"), str(HERE.parent / "returning_session_tiers")]

import peers  # noqa: E402
import sides  # noqa: E402


class NoPeer(Exception):
    """A peer cannot be installed. The message says which and why."""


@dataclass(frozen=True)
class Installed:
    """vLLM's interpreter and LMCache's folder; None: not wanted."""

    vllm: Path | None = None
    lmcache: Path | None = None


def install(*, vllm: bool, lmcache: bool) -> Installed:
    """Install what is wanted and missing; takes minutes the first time. Raises NoPeer."""
    try:
        python, folder = peers.environment() if lmcache else (sides.environment() if vllm else None, None)
    except sides.NoPeer as e:
        raise NoPeer(str(e)) from e
    return Installed(python, folder)
