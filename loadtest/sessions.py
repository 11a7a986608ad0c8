"""Decides which requests of a trace are turns of one conversation.

Turn t+1's prompt begins with all of turn t's, so it has all its full blocks (the last block is partial, and its id
changes as it fills). Blocks that most requests begin with (a service's system prompt) identify no conversation. A
trace's own names of conversations take precedence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from loadtest.traces import TraceRequest

#: A block followed by at least this many different blocks belongs to no single conversation.
_MANY_WAYS = 4


@dataclass(slots=True)
class Session:
    """A conversation: its turns by arrival, each prompt extending the one before."""

    name: str
    turns: list[TraceRequest] = field(default_factory=list)


def find_sessions(requests: Iterable[TraceRequest]) -> list[Session]:
    """Sessions in order of their first request; every request is in exactly one.

    A request continues the session with the longest last prompt that it extends. Otherwise it begins a session: also a
    branch (a regenerated answer), and a resend that has not grown.
    """
    ordered = sorted(requests, key=lambda r: r.arrival_s)
    preamble = _preamble_blocks(ordered)
    sessions: list[Session] = []
    named: dict[str, Session] = {}
    #: Session by (last full block of its last prompt, that block's position). A block id identifies its whole prefix.
    open_at: dict[tuple[int, int], Session] = {}
    for request in ordered:
        session = (
            named.get(request.conversation)
            if request.conversation is not None
            else _extended(request, open_at, preamble)
        )
        if session is None:
            session = Session(f"s{len(sessions):05d}")
            sessions.append(session)
        if request.conversation is not None:
            named[request.conversation] = session
        else:
            if session.turns:
                open_at.pop(_tip(session.turns[-1]), None)
            if _tip(request)[1] > preamble:
                open_at[_tip(request)] = session
        session.turns.append(request)
    return sessions


def first_requests(sessions: Iterable[Session], count: int, min_turns: int = 1) -> list[Session]:
    """The first `count` requests by arrival, of sessions with at least `min_turns` turns, as truncated sessions."""
    eligible = [s for s in sessions if len(s.turns) >= min_turns]
    order = sorted((t.arrival_s, i, k) for i, s in enumerate(eligible) for k, t in enumerate(s.turns))[:count]
    kept = Counter(i for _, i, _ in order)
    return [Session(s.name, s.turns[: kept[i]]) for i, s in enumerate(eligible) if kept[i]]


def shared_blocks(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common prefix of two lists of block ids."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))


def _preamble_blocks(requests: Sequence[TraceRequest]) -> int:
    """Number of leading blocks that belong to the service: at least half of all requests have them, and
    `_MANY_WAYS` different blocks follow."""
    preamble, depth, remaining = 0, 0, list(requests)
    while True:
        counts = Counter(r.block_ids[depth] for r in remaining if len(r.block_ids) > depth)
        block, times = counts.most_common(1)[0] if counts else (0, 0)
        if 2 * times < max(1, len(requests)):
            return preamble
        remaining = [r for r in remaining if len(r.block_ids) > depth and r.block_ids[depth] == block]
        depth += 1
        if len({r.block_ids[depth] for r in remaining if len(r.block_ids) > depth}) >= _MANY_WAYS:
            preamble = depth


def _tip(request: TraceRequest) -> tuple[int, int]:
    full = min(request.input_tokens // request.block_tokens, len(request.block_ids))
    return (request.block_ids[full - 1] if full else -1, full)


def _extended(request: TraceRequest, open_at: dict[tuple[int, int], Session], preamble: int) -> Session | None:
    for depth in range(len(request.block_ids), preamble, -1):
        session = open_at.get((request.block_ids[depth - 1], depth))
        if session is not None:
            last = session.turns[-1]
            if request.input_tokens > last.input_tokens and shared_blocks(request.block_ids, last.block_ids) >= depth:
                return session
    return None
