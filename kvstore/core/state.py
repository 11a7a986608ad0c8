"""The states of pieces, copies and loads, and which moves between them are legal.

The tables are data: `move` is the only way a state changes, and a move that its table does not list raises
IllegalTransition.

A piece, in this node's arena:

    ABSENT ──> EXPECTED ──> QUEUED ──> LOADING ──> READY        brought from a peer
    ABSENT ───────────────> QUEUED ──> LOADING ──> READY        brought from the SSD or the blob tier
    ABSENT ──> SAVING ───────────────────────────> READY        written by the worker
    every state ──> ABSENT                                      evicted, failed, cancelled or erased

A copy of a whole chunk on the SSD or in the blob tier:

    ABSENT ──> WAITING ──> PRESENT        written behind
    ABSENT ──> PRESENT                    found by recovery or by a probe
    ABSENT, WAITING ──> SKIPPED           over the write-back limit, or the write failed
    any ──> ABSENT                        lost, corrupt or erased
"""

from __future__ import annotations

from enum import IntEnum
from typing import TypeVar

from contracts.errors import IllegalTransition


class PieceState(IntEnum):
    """Where one layer of one chunk stands in the arena."""

    ABSENT = 0
    EXPECTED = 1  #: covered by a lease from a peer
    QUEUED = 2  #: a fetch is planned; no slot yet
    LOADING = 3  #: a fetch runs; the slot is reserved
    SAVING = 4  #: the worker writes it; the slot is reserved
    READY = 5  #: readable


class CopyState(IntEnum):
    """Where the whole chunk stands in a slower tier."""

    ABSENT = 0
    WAITING = 1
    PRESENT = 2
    SKIPPED = 3


class LoadState(IntEnum):
    """LOCATING: sources are being asked. FLOWING: the owner knows how many chunks come. ENDED: nothing more comes."""

    LOCATING = 0
    FLOWING = 1
    ENDED = 2


class TierState(IntEnum):
    """Whether a tier is used (health.py)."""

    HEALTHY = 0
    DEGRADED = 1
    TRIAL = 2


_P, _C, _L, _T = PieceState, CopyState, LoadState, TierState

PIECE_MOVES: dict[PieceState, frozenset[PieceState]] = {
    _P.ABSENT: frozenset({_P.EXPECTED, _P.QUEUED, _P.SAVING}),
    _P.EXPECTED: frozenset({_P.QUEUED, _P.ABSENT}),
    _P.QUEUED: frozenset({_P.LOADING, _P.ABSENT}),
    _P.LOADING: frozenset({_P.READY, _P.ABSENT}),
    _P.SAVING: frozenset({_P.READY, _P.ABSENT}),
    _P.READY: frozenset({_P.ABSENT}),
}
COPY_MOVES: dict[CopyState, frozenset[CopyState]] = {
    _C.ABSENT: frozenset({_C.WAITING, _C.PRESENT, _C.SKIPPED}),
    _C.WAITING: frozenset({_C.PRESENT, _C.SKIPPED, _C.ABSENT}),
    _C.PRESENT: frozenset({_C.ABSENT}),
    _C.SKIPPED: frozenset({_C.WAITING, _C.PRESENT, _C.ABSENT}),
}
LOAD_MOVES: dict[LoadState, frozenset[LoadState]] = {
    _L.LOCATING: frozenset({_L.FLOWING, _L.ENDED}),
    _L.FLOWING: frozenset({_L.ENDED}),
    _L.ENDED: frozenset(),
}

TIER_MOVES: dict[TierState, frozenset[TierState]] = {
    _T.HEALTHY: frozenset({_T.DEGRADED}),
    _T.DEGRADED: frozenset({_T.TRIAL}),
    _T.TRIAL: frozenset({_T.HEALTHY, _T.DEGRADED}),
}

S = TypeVar("S", PieceState, CopyState, LoadState, TierState)


def move(moves: dict[S, frozenset[S]], old: S, new: S) -> S:
    """`new`, if the table allows it after `old`. Raises IllegalTransition otherwise."""
    if new not in moves[old]:
        raise IllegalTransition(f"{type(old).__name__}: {old.name} -> {new.name}")
    return new
