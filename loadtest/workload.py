"""The work that a load test sends: sessions whose turns have texts, answer lengths, arrival and typing times.

Decides how a trace's lengths become lengths that the model under test can hold, and what each turn adds to its conversation.
Turn t's prompt is turn t-1's prompt, the server's own answer, and new text: the part of the trace's prompt past the previous
prompt and answer. Everything is determined by trace, seed and scales.
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

#: What a chat template adds to a turn (two messages' markers), generously.
TEMPLATE_TOKENS = 16
#: Words are about a token, not exactly; and a turn says at least so much.
_TOKENS_PER_WORD = 1.02
_MIN_WORDS = 2
_MIN_ANSWER_TOKENS = 2
#: Above every block id of a trace, those that a reader invents included.
_SALTED = 1 << 44

__all__ = ["PlannedSession", "PlannedTurn", "fitting_scale", "longest_tokens", "plan", "prefill_heavy", "salted", "turn_lengths"]


def longest_tokens(sessions: Iterable[Session], scale: float, max_answer_tokens: int | None) -> int:
    """About how many tokens the longest session has after its last answer when lengths are scaled by `scale`."""
    longest = 0.0
    for session in sessions:
        tokens = 0.0
        for words, answer in turn_lengths(session.turns, scale, max_answer_tokens):
            tokens += words * _TOKENS_PER_WORD + answer + TEMPLATE_TOKENS
        longest = max(longest, tokens)
    return math.ceil(longest)


def fitting_scale(sessions: Sequence[Session], max_context_tokens: int, max_answer_tokens: int | None = None) -> float:
    """The largest scale, 1 at most and in steps of 1/1000, at which every session fits. Raises ValueError when none does."""
    low, high = 0, 1000
    while low < high:
        middle = (low + high + 1) // 2
        if longest_tokens(sessions, middle / 1000, max_answer_tokens) <= max_context_tokens:
            low = middle
        else:
            high = middle - 1
    if low == 0:
        raise ValueError(f"the longest session does not fit {max_context_tokens} tokens at any scale; use a model with more")
    return low / 1000


def salted(sessions: Sequence[Session], salt: int) -> list[Session]:
    """The same conversations with other words and other names for every `salt`, so that none is cached from a run before; 0: as they are.

    Prefixes that were equal still are.
    """
    if not salt:
        return list(sessions)
    return [
        Session(f"{s.name}-{salt}", [replace(t, block_ids=tuple(b + salt * _SALTED for b in t.block_ids)) for t in s.turns])
        for s in sessions
    ]


def prefill_heavy(sessions: Sequence[Session], prompt_tokens: int = 1024, answer_tokens: int = 1) -> list[Session]:
    """Every turn asks `prompt_tokens` and is answered with `answer_tokens`, at the trace's times (SYMPHONY, figure 18)."""
    made = []
    for session in sessions:
        turns, history = [], 0
        for turn in session.turns:
            history += prompt_tokens
            # A block goes on past its end (`prompts.prompt_words`); the last one of a first turn is no other conversation's.
            turns.append(replace(turn, input_tokens=history, output_tokens=answer_tokens, block_ids=session.turns[0].block_ids[-1:]))
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
    """The work of `sessions`: lengths times `length_scale`, all times (reading and typing included) times `time_scale`.

    trace_texts: say what the trace's texts say, as they are, where it has any; `length_scale` is then for answers alone.
    The first request arrives one typing time after the load's start at the earliest, so that it too can be hinted.
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
    """The range of the trace's prompt that turn `number` adds; empty when the trace's prompt grew by less than its answer."""
    if number == 0:
        return 0, turns[0].input_tokens
    before = turns[number - 1].input_tokens + turns[number - 1].output_tokens
    return before, max(before, turns[number].input_tokens)


def turn_lengths(turns: Sequence[TraceRequest], scale: float, max_answer_tokens: int | None) -> list[tuple[int, int]]:
    """(words of new text, tokens of the answer) of every turn."""
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
        # Too short to say anything after scaling: words of the prompt's end, so that no turn is empty.
        said = prompt_words(turn.block_ids, turn.block_tokens, 1.0, max(0, turn.input_tokens - words), turn.input_tokens)
    return " ".join(said)
