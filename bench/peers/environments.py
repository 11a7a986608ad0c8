"""The environments of the peers, each made once under .cache/ by pip, pinned: vLLM's is bench/engine's, LMCache's
bench/returning_session_tiers'."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "engine"), str(HERE.parent / "returning_session_tiers")]

import peers  # noqa: E402
import sides  # noqa: E402


class NoPeer(Exception):
    """A peer cannot be installed here. The message says which and why."""


@dataclass(frozen=True)
class Installed:
    """Interpreters and folders of what is there; None: not wanted."""

    vllm: Path | None = None
    lmcache: Path | None = None


def install(*, vllm: bool, lmcache: bool) -> Installed:
    """Make what is wanted and missing; minutes for each, once. Raises NoPeer."""
    try:
        python, folder = peers.environment() if lmcache else (sides.environment() if vllm else None, None)
    except sides.NoPeer as e:
        raise NoPeer(str(e)) from e
    return Installed(python, folder)
