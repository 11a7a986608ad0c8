"""One request of a simulated user, with its results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field

from contracts.ids import SessionKey
from contracts.turn_times import Phase
from contracts.workflow import Hop


@dataclass(slots=True, eq=False)
class Request:
    """One turn. prompt_tokens: history included; history_tokens: the session's previous prompt and answer.

    Times are virtual seconds; first_s, last_s and end_s are -1 until known. cached_tokens: prompt tokens not computed.
    """

    request_id: str
    session: SessionKey
    turn: int
    prompt_tokens: int
    history_tokens: int
    answer_tokens: int
    sent_s: float
    done: Callable[[Request], None]
    _: KW_ONLY
    priority: int = 0
    expected_tokens: int | None = None
    #: Its application run, and its place in the run's workflow (agents).
    group: str = ""
    hop: Hop | None = None
    node: str = ""
    cached_tokens: int = 0
    #: Seconds by phase until the first token, on the node.
    waits: Mapping[Phase, float] = field(default_factory=dict)
    first_s: float = -1.0
    #: When its last token came.
    last_s: float = -1.0
    end_s: float = -1.0
