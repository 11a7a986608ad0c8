"""Plans a load from a trace: texts, answer lengths, arrival and typing times of each turn.

Decides how a trace's lengths are scaled to the tested model's context, and what each turn adds. Turn t's prompt is turn
t-1's prompt, the server's answer, and new text: the trace's prompt past the previous prompt and answer. Depends only on
trace, seed and scales.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from loadtest.plans import PlannedSession, PlannedTurn
from loadtest.prompts import prompt_words, scaled
from loadtest.sessions import Session
from loadtest.traces import TraceRequest
from loadtest.typist import reading_time, typing_times

#: Upper estimate of a chat template's tokens a turn (markers of two messages).
TEMPLATE_TOKENS = 16
#: Words are not exactly one token each; and the least words of a turn.
_TOKENS_PER_WORD = 1.02
_MIN_WORDS = 2
_MIN_ANSWER_TOKENS = 2
#: Above all block ids of traces, invented ones included.
_SALTED = 1 << 44

__all__ = [
    "PlannedSession",
    "PlannedTurn",
    "fitting_scale",
    "longest_tokens",
    "plan",
    "prefill_heavy",
    "salted",
    "turn_lengths",
]


def longest_tokens(sessions: Iterable[Session], scale: float, max_answer_tokens: int | None) -> int:
    """About the tokens of the longest session after its last answer, with lengths scaled by `scale`."""
    longest = 0.0
    for session in sessions:
        tokens = 0.0
        for words, answer in turn_lengths(session.turns, scale, max_answer_tokens):
            tokens += words * _TOKENS_PER_WORD + answer + TEMPLATE_TOKENS
        longest = max(longest, tokens)
    return math.ceil(longest)


def fitting_scale(sessions: Sequence[Session], max_context_tokens: int, max_answer_tokens: int | None = None) -> float:
    """The largest scale up to 1, in steps of 1/1000, at which every session fits. Raises ValueError if none does."""
    low, high = 0, 1000
    while low < high:
        middle = (low + high + 1) // 2
        if longest_tokens(sessions, middle / 1000, max_answer_tokens) <= max_context_tokens:
            low = middle
        else:
            high = middle - 1
    if low == 0:
        raise ValueError(
            f"the longest session does not fit {max_context_tokens} tokens at any scale; use a model with more"
        )
    return low / 1000


def salted(sessions: Sequence[Session], salt: int) -> list[Session]:
    """The same conversations with other words and names for each `salt`, so that no earlier run's cache matches.

    Equal prefixes stay equal. salt: 0: unchanged.
    """
    if not salt:
        return list(sessions)
    return [
        Session(
            f"{s.name}-{salt}", [replace(t, block_ids=tuple(b + salt * _SALTED for b in t.block_ids)) for t in s.turns]
        )
        for s in sessions
    ]


def prefill_heavy(sessions: Sequence[Session], prompt_tokens: int = 1024, answer_tokens: int = 1) -> list[Session]:
    """Every turn adds `prompt_tokens` and gets `answer_tokens`, at the trace's times (SYMPHONY, figure 18)."""
    made = []
    for session in sessions:
        turns, history = [], 0
        for turn in session.turns:
            history += prompt_tokens
            # A prompt past its last block continues it (`prompts.prompt_words`), and the last block of a first turn
            # belongs to one conversation only.
            turns.append(
                replace(
                    turn, input_tokens=history, output_tokens=answer_tokens, block_ids=session.turns[0].block_ids[-1:]
                )
            )
            history += answer_tokens
        made.append(Session(session.name, turns))
    return made


def plan(
    sessions: Sequence[Session],
    *,
    length_scale: float,
    time_scale: float,
    seed: int,
    max_answer_tokens: int | None = None,
    trace_texts: bool = False,
) -> list[PlannedSession]:
    """Plan `sessions`: lengths times `length_scale`, all times (reading and typing included) times `time_scale`.

    trace_texts: use the trace's texts unscaled, if it has any; `length_scale` then applies to answers only. The first
    request arrives no earlier than one typing time after the start, so that it can have a hint.
    """
    typing = iter(typing_times(sum(len(s.turns) for s in sessions), seed))
    drawn = [[next(typing) for _ in s.turns] for s in sessions]
    lead_s = max((t[0] - s.turns[0].arrival_s for s, t in zip(sessions, drawn, strict=True)), default=0.0)
    lead_s = max(0.0, lead_s)
    planned = []
    for session, typed in zip(sessions, drawn, strict=True):
        turns = []
        lengths = turn_lengths(session.turns, length_scale, max_answer_tokens)
        for number, (turn, typing_s, (words, answer)) in enumerate(zip(session.turns, typed, lengths, strict=True)):
            turns.append(
                PlannedTurn(
                    text=_text(session.turns, number, length_scale, words),
                    answer_tokens=answer,
                    arrival_s=(lead_s + turn.arrival_s) * time_scale,
                    typing_s=typing_s * time_scale,
                    reading_s=reading_time(answer) * time_scale,
                    messages=turn.messages if trace_texts else (),
                    extra=turn.extra,
                )
            )
        planned.append(PlannedSession(session.name, tuple(turns), model=session.turns[0].model))
    return planned


def _new_tokens(turns: Sequence[TraceRequest], number: int) -> tuple[int, int]:
    """The range of the trace's prompt that turn `number` adds; empty if the prompt grew by less than the last
    answer."""
    if number == 0:
        return 0, turns[0].input_tokens
    before = turns[number - 1].input_tokens + turns[number - 1].output_tokens
    return before, max(before, turns[number].input_tokens)


def turn_lengths(turns: Sequence[TraceRequest], scale: float, max_answer_tokens: int | None) -> list[tuple[int, int]]:
    """(words of new text, tokens of the answer) of each turn."""
    lengths = []
    for number, turn in enumerate(turns):
        start, end = _new_tokens(turns, number)
        words = max(_MIN_WORDS, scaled(end, scale) - scaled(start, scale))
        answer = max(_MIN_ANSWER_TOKENS, scaled(turn.output_tokens, scale))
        lengths.append((words, min(answer, max_answer_tokens) if max_answer_tokens else answer))
    return lengths


def _text(turns: Sequence[TraceRequest], number: int, scale: float, words: int) -> str:
    turn = turns[number]
    start, end = _new_tokens(turns, number)
    said = prompt_words(turn.block_ids, turn.block_tokens, scale, start, end)
    if len(said) < words:
        # Too short after scaling: use words of the prompt's end, so that no turn is empty.
        said = prompt_words(
            turn.block_ids, turn.block_tokens, 1.0, max(0, turn.input_tokens - words), turn.input_tokens
        )
    return " ".join(said)
