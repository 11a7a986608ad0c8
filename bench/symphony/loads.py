"""The loads of SYMPHONY's evaluation, drawn from published statistics, as neither data set may be redistributed.

ShareGPT-like. SYMPHONY: 73.4 % of the conversations have several turns, some over 400 (figure 3); a session has 2.2 K
tokens on average (section 2.2); requests come 11.3 s after the first key (section 1). CachedAttention (USENIX ATC '24,
section 2.3): 5.75 turns per conversation. vLLM (SOSP '23, figure 11): answers are about twice as long as prompts. So
turns are 1, or 2 plus a log-normal number; prompts and answers are log-normal, 1 to 2.4, together 383 tokens a turn.

BurstGPT-like. Pauses between turns come in bursts, most of seconds, some of minutes (BurstGPT, figure 9): log-normal
with a coefficient of variation of 2 and the mean of above. Prompts are longer, answers shorter (621 and 126 tokens).

Busy. The ShareGPT-like conversations of users who type as soon as an answer ends. In the paper's figure 1 users have a
request active nearly always, which excludes reading.

Users start in the middle of a conversation drawn by its length; the history so far is computed during warm-up. The seed
determines everything.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace

from contracts.ids import DEFAULT_TENANT, SessionKey
from loadtest.simulate.users import Script, ScriptedTurn
from loadtest.traces import TOKENS_PER_WORD
from loadtest.typist import READ_WORDS_PER_S, typing_times

SINGLE, MEAN_TURNS, TURNS_SIGMA, MOST_TURNS = 0.266, 5.75, 1.2, 500
PROMPT_TOKENS, ANSWER_TOKENS, MOST_TOKENS = 113.0, 270.0, 4096
BURST_PROMPT_TOKENS, BURST_ANSWER_TOKENS, BURST_VARIATION = 621.0, 126.0, 2.0
#: Lengths of the prefill-heavy load (figure 18).
HEAVY_PROMPT_TOKENS, HEAVY_ANSWER_TOKENS = 1024, 1

#: Draws a turn of a conversation.
Draw = Callable[[random.Random], ScriptedTurn]


def _lognormal(rng: random.Random, mean: float, sigma: float) -> float:
    return rng.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma)


def turn_count(rng: random.Random) -> int:
    """Draw the number of turns of a conversation."""
    if rng.random() < SINGLE:
        return 1
    more = (MEAN_TURNS - SINGLE) / (1 - SINGLE) - 2
    return min(2 + round(_lognormal(rng, more + 0.0, TURNS_SIGMA)), MOST_TURNS)


def _tokens(rng: random.Random, mean: float, sigma: float) -> int:
    return min(max(4, round(_lognormal(rng, mean, sigma))), MOST_TOKENS)


def chat_turn(rng: random.Random) -> ScriptedTurn:
    """ShareGPT-like: reading at reading speed, typing about 11 s."""
    return ScriptedTurn(
        _tokens(rng, PROMPT_TOKENS, 1.0), _tokens(rng, ANSWER_TOKENS, 0.8), typing_times(1, rng.getrandbits(32))[0]
    )


def busy_turn(rng: random.Random) -> ScriptedTurn:
    """A chat turn read while it is streamed."""
    return replace(chat_turn(rng), reading_s=0.0)


def burst_turn(rng: random.Random) -> ScriptedTurn:
    """BurstGPT-like: pauses come in bursts."""
    mean_s = ANSWER_TOKENS / TOKENS_PER_WORD / READ_WORDS_PER_S
    sigma = math.sqrt(math.log(1 + BURST_VARIATION**2))
    new, answer = _tokens(rng, BURST_PROMPT_TOKENS, 1.0), _tokens(rng, BURST_ANSWER_TOKENS, 0.8)
    return ScriptedTurn(new, answer, typing_times(1, rng.getrandbits(32))[0], reading_s=_lognormal(rng, mean_s, sigma))


def heavy_turn(rng: random.Random) -> ScriptedTurn:
    """Prefill-heavy: replaced lengths with a chat turn's times."""
    chat = chat_turn(rng)
    reading_s = chat.answer_tokens / TOKENS_PER_WORD / READ_WORDS_PER_S
    return replace(chat, new_tokens=HEAVY_PROMPT_TOKENS, answer_tokens=HEAVY_ANSWER_TOKENS, reading_s=reading_s)


def conversation(rng: random.Random, turn: Draw, max_tokens: int, turns: int) -> tuple[ScriptedTurn, ...]:
    """`turns` turns, or as many as fit `max_tokens`."""
    said: list[ScriptedTurn] = []
    total = 0
    for _ in range(turns):
        one = turn(rng)
        total += one.new_tokens + one.answer_tokens
        if total > max_tokens:
            break
        said.append(one)
    return tuple(said)


def in_the_middle(rng: random.Random, turn: Draw, max_tokens: int) -> tuple[ScriptedTurn, ...]:
    """The rest of a conversation from a random moment on; its first prompt holds the history."""
    while True:  # accept with a probability proportional to length
        count = turn_count(rng)
        if rng.random() < count / MOST_TURNS * 8:
            break
    said = conversation(rng, turn, max_tokens, count)
    at = rng.randrange(len(said))
    before = sum(t.new_tokens + t.answer_tokens for t in said[:at])
    return (replace(said[at], new_tokens=said[at].new_tokens + before), *said[at + 1 :])


def user_scripts(
    users: int, seconds: float, max_tokens: int, seed: int, turn: Draw, urgent: float = 0.0, tokens: int = 1 << 30
) -> list[Script]:
    """Conversations for `users` users and `seconds`. User n has scripts n, n + users, and so on.

    urgent: share of conversations with priority -1. tokens: most tokens of a conversation that a node's HBM holds.
    """
    most = min(max_tokens, tokens)
    rounds = 1 + math.ceil(seconds / 20.0)
    queues = []
    for user in range(users):
        rng = random.Random(f"{seed} {user}")
        queue, time_s = [in_the_middle(rng, turn, most)], 0.0
        while len(queue) < rounds:
            time_s += sum(_least_s(t) for t in queue[-1])
            if time_s > seconds:
                break
            queue.append(conversation(rng, turn, most, turn_count(rng)))
        queues.append(queue)
    scripts = []
    for n in range(max(map(len, queues))):
        for user, queue in enumerate(queues):
            # placeholder that is never sent: typing takes forever
            turns = queue[n] if n < len(queue) else (ScriptedTurn(16, 1, 1e9),)
            rng = random.Random(f"{seed} {user} {n} urgent")
            scripts.append(
                Script(SessionKey(DEFAULT_TENANT, f"p{user}-{n}"), turns, -1 if rng.random() < urgent else 0)
            )
    return scripts


def _least_s(turn: ScriptedTurn) -> float:
    reading_s = turn.answer_tokens / TOKENS_PER_WORD / READ_WORDS_PER_S if turn.reading_s is None else turn.reading_s
    return turn.typing_s + reading_s


def sharegpt_like(
    users: int, seconds: float, max_tokens: int, seed: int, urgent: float = 0.0, tokens: int = 1 << 30
) -> list[Script]:
    """See the module docstring."""
    return user_scripts(users, seconds, max_tokens, seed, chat_turn, urgent, tokens)


def busy(
    users: int, seconds: float, max_tokens: int, seed: int, urgent: float = 0.0, tokens: int = 1 << 30
) -> list[Script]:
    """See the module docstring."""
    return user_scripts(users, seconds, max_tokens, seed, busy_turn, urgent, tokens)


def burstgpt_like(users: int, seconds: float, max_tokens: int, seed: int, tokens: int = 1 << 30) -> list[Script]:
    """See the module docstring."""
    return user_scripts(users, seconds, max_tokens, seed, burst_turn, tokens=tokens)


def prefill_heavy(users: int, seconds: float, max_tokens: int, seed: int, tokens: int = 1 << 30) -> list[Script]:
    """See the module docstring."""
    return user_scripts(users, seconds, max_tokens, seed, heavy_turn, tokens=tokens)
