"""The loads of SYMPHONY's evaluation, with lengths and pauses drawn from published statistics: neither data set may be shipped here.

ShareGPT-like. Of SYMPHONY's own text: 73.4 % of the conversations have several turns, some over 400 (figure 3); a session has 2.2 K tokens
on average (section 2.2); requests come 11.3 s after the first key (section 1). Of CachedAttention (USENIX ATC '24, section 2.3): 5.75 turns
a conversation. Of vLLM (SOSP '23, figure 11): answers are about twice as long as prompts. From these: turns are 1, or 2 and a log-normal
number, with that mean; prompts and answers are log-normal, with a ratio of 1 to 2.4 and 383 tokens a turn together.

BurstGPT-like. People pause between two queries of a session not as long as they read and type but in bursts: most for seconds, some for
minutes (BurstGPT, figure 9): log-normal with a coefficient of variation of 2, and the same mean as above. Prompts are longer and answers
shorter (621 and 126 tokens on average there).

Busy: the same conversations of people who begin to type as soon as an answer has ended. In the paper's figure 1 a user has a request under
way nearly all of the time, which nobody who also reads has.

A person is met in the middle of a conversation that is drawn by its length, as whoever looks at a moment finds them: the history so far is
computed once, during warm-up. Everything is determined by the seed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace

from contracts.ids import DEFAULT_TENANT, SessionKey
from loadtest.simulate.users import Script, Turn
from loadtest.traces import TOKENS_PER_WORD
from loadtest.typist import READ_WORDS_PER_S, typing_times

SINGLE, MEAN_TURNS, TURNS_SIGMA, MOST_TURNS = 0.266, 5.75, 1.2, 500
PROMPT_TOKENS, ANSWER_TOKENS, MOST_TOKENS = 113.0, 270.0, 4096
BURST_PROMPT_TOKENS, BURST_ANSWER_TOKENS, BURST_VARIATION = 621.0, 126.0, 2.0
#: What the prefill-heavy load says (figure 18).
HEAVY_PROMPT_TOKENS, HEAVY_ANSWER_TOKENS = 1024, 1

#: A turn of this conversation, from a source of chance.
Draw = Callable[[random.Random], Turn]


def _lognormal(rng: random.Random, mean: float, sigma: float) -> float:
    return rng.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma)


def turn_count(rng: random.Random) -> int:
    """Turns of a conversation."""
    if rng.random() < SINGLE:
        return 1
    more = (MEAN_TURNS - SINGLE) / (1 - SINGLE) - 2
    return min(2 + round(_lognormal(rng, more + 0.0, TURNS_SIGMA)), MOST_TURNS)


def _tokens(rng: random.Random, mean: float, sigma: float) -> int:
    return min(max(4, round(_lognormal(rng, mean, sigma))), MOST_TOKENS)


def chat_turn(rng: random.Random) -> Turn:
    """As in ShareGPT: read at the speed of reading, typed in about 11 s."""
    return Turn(_tokens(rng, PROMPT_TOKENS, 1.0), _tokens(rng, ANSWER_TOKENS, 0.8), typing_times(1, rng.getrandbits(32))[0])


def busy_turn(rng: random.Random) -> Turn:
    """The chat's, read while it is streamed."""
    return replace(chat_turn(rng), reading_s=0.0)


def burst_turn(rng: random.Random) -> Turn:
    """As in BurstGPT: pauses come in bursts."""
    mean_s = ANSWER_TOKENS / TOKENS_PER_WORD / READ_WORDS_PER_S
    sigma = math.sqrt(math.log(1 + BURST_VARIATION**2))
    new, answer = _tokens(rng, BURST_PROMPT_TOKENS, 1.0), _tokens(rng, BURST_ANSWER_TOKENS, 0.8)
    return Turn(new, answer, typing_times(1, rng.getrandbits(32))[0], reading_s=_lognormal(rng, mean_s, sigma))


def heavy_turn(rng: random.Random) -> Turn:
    """Prefill-heavy: lengths replaced, times those of the chat."""
    chat = chat_turn(rng)
    reading_s = chat.answer_tokens / TOKENS_PER_WORD / READ_WORDS_PER_S
    return replace(chat, new_tokens=HEAVY_PROMPT_TOKENS, answer_tokens=HEAVY_ANSWER_TOKENS, reading_s=reading_s)


def conversation(rng: random.Random, turn: Draw, max_tokens: int, turns: int) -> tuple[Turn, ...]:
    """So many turns, or as many as fit `max_tokens`."""
    said: list[Turn] = []
    total = 0
    for _ in range(turns):
        one = turn(rng)
        total += one.new_tokens + one.answer_tokens
        if total > max_tokens:
            break
        said.append(one)
    return tuple(said)


def in_the_middle(rng: random.Random, turn: Draw, max_tokens: int) -> tuple[Turn, ...]:
    """What is left of a conversation that somebody has at a random moment, what was said before in its first prompt."""
    while True:  # drawn by length: kept with a chance that grows with it
        count = turn_count(rng)
        if rng.random() < count / MOST_TURNS * 8:
            break
    said = conversation(rng, turn, max_tokens, count)
    at = rng.randrange(len(said))
    before = sum(t.new_tokens + t.answer_tokens for t in said[:at])
    return (replace(said[at], new_tokens=said[at].new_tokens + before), *said[at + 1 :])


def people(users: int, seconds: float, max_tokens: int, seed: int, turn: Draw, urgent: float = 0.0, tokens: int = 1 << 30) -> list[Script]:
    """Conversations for so many people and so long: the n-th has the n-th and every `users`-th after it.

    urgent: the share of conversations of priority -1. tokens: the most that a node's HBM can take of one.
    """
    most = min(max_tokens, tokens)
    rounds = 1 + math.ceil(seconds / 20.0)
    queues = []
    for person in range(users):
        rng = random.Random(f"{seed} {person}")
        queue, time_s = [in_the_middle(rng, turn, most)], 0.0
        while len(queue) < rounds:
            time_s += sum(_least_s(t) for t in queue[-1])
            if time_s > seconds:
                break
            queue.append(conversation(rng, turn, most, turn_count(rng)))
        queues.append(queue)
    scripts = []
    for n in range(max(map(len, queues))):
        for person, queue in enumerate(queues):
            turns = queue[n] if n < len(queue) else (Turn(16, 1, 1e9),)  # never sent: it is typed until the end of time
            rng = random.Random(f"{seed} {person} {n} urgent")
            scripts.append(Script(SessionKey(DEFAULT_TENANT, f"p{person}-{n}"), turns, -1 if rng.random() < urgent else 0))
    return scripts


def _least_s(turn: Turn) -> float:
    reading_s = turn.answer_tokens / TOKENS_PER_WORD / READ_WORDS_PER_S if turn.reading_s is None else turn.reading_s
    return turn.typing_s + reading_s


def sharegpt_like(users: int, seconds: float, max_tokens: int, seed: int, urgent: float = 0.0, tokens: int = 1 << 30) -> list[Script]:
    """See the module."""
    return people(users, seconds, max_tokens, seed, chat_turn, urgent, tokens)


def busy(users: int, seconds: float, max_tokens: int, seed: int, urgent: float = 0.0, tokens: int = 1 << 30) -> list[Script]:
    """See the module."""
    return people(users, seconds, max_tokens, seed, busy_turn, urgent, tokens)


def burstgpt_like(users: int, seconds: float, max_tokens: int, seed: int, tokens: int = 1 << 30) -> list[Script]:
    """See the module."""
    return people(users, seconds, max_tokens, seed, burst_turn, tokens=tokens)


def prefill_heavy(users: int, seconds: float, max_tokens: int, seed: int, tokens: int = 1 << 30) -> list[Script]:
    """See the module."""
    return people(users, seconds, max_tokens, seed, heavy_turn, tokens=tokens)
