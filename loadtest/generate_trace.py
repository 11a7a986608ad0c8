"""Makes traces of our own in the Mooncake format: `python -m loadtest.generate_trace --out FILE`.

Decides how generated conversations look: they start at random (Poisson) times, share one preamble block, have a geometric
number of turns, log-normal lengths, and a next turn after the answer was read and the next prompt typed. No number in here is
taken from a published trace.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Annotated

import typer

from loadtest.traces import MOONCAKE_BLOCK_TOKENS, TOKENS_PER_WORD
from loadtest.typist import READ_WORDS_PER_S, typing_times

#: Answers stream at this pace in a generated trace, tokens a second.
_ANSWER_TOKENS_PER_S = 40.0
_MAX_TURNS = 12


def generate(
    sessions: int, seed: int, sessions_per_s: float = 0.4, mean_turns: float = 3.0, mean_prompt_tokens: float = 3000.0
) -> list[dict[str, object]]:
    """Lines of a Mooncake trace, by arrival: `timestamp` (ms), `input_length`, `output_length`, `hash_ids`."""
    rng = random.Random(seed)
    next_block = 1
    requests: list[tuple[float, int, int, list[int]]] = []
    start_s = 0.0
    for index in range(sessions):
        start_s += rng.expovariate(sessions_per_s)
        turns = 1
        while turns < _MAX_TURNS and rng.random() > 1 / mean_turns:
            turns += 1
        pauses = typing_times(turns, seed=seed * 1_000_003 + index)
        at, tokens, full = start_s, 0, [0]
        for turn in range(turns):
            # A long first prompt (documents, instructions), short ones after it.
            said = mean_prompt_tokens if turn == 0 else 0.04 * mean_prompt_tokens
            tokens += max(8, round(rng.lognormvariate(0.0, 0.7) * said))
            answer = max(4, round(rng.lognormvariate(5.3, 0.8)))
            while len(full) < tokens // MOONCAKE_BLOCK_TOKENS:
                full.append(next_block)
                next_block += 1
            ids = full[: max(1, tokens // MOONCAKE_BLOCK_TOKENS)]
            if tokens % MOONCAKE_BLOCK_TOKENS and tokens > MOONCAKE_BLOCK_TOKENS:
                ids = [*ids, next_block]
                next_block += 1
            requests.append((at, tokens, answer, ids))
            tokens += answer
            at += answer / _ANSWER_TOKENS_PER_S + answer / TOKENS_PER_WORD / READ_WORDS_PER_S + pauses[turn]
    requests.sort()
    return [
        {"timestamp": round(at * 1000), "input_length": tokens, "output_length": answer, "hash_ids": ids}
        for at, tokens, answer, ids in requests
    ]


def write(path: Path, lines: list[dict[str, object]]) -> None:
    """Write `lines` to `path`, a JSON object a line."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def main(
    out: Annotated[Path, typer.Option(help="where the trace goes")],
    sessions: Annotated[int, typer.Option(help="conversations", min=1)] = 100,
    seed: Annotated[int, typer.Option(help="equal seeds make equal traces")] = 1,
    sessions_per_s: Annotated[float, typer.Option(help="conversations that start, a second")] = 0.4,
    mean_turns: Annotated[float, typer.Option(help="turns a conversation", min=1.0)] = 3.0,
    mean_prompt_tokens: Annotated[float, typer.Option(help="tokens of a first prompt, about")] = 3000.0,
) -> None:
    """Write a trace of generated conversations in the Mooncake format."""
    lines = generate(sessions, seed, sessions_per_s, mean_turns, mean_prompt_tokens)
    write(out, lines)
    typer.echo(f"{out}: {len(lines)} requests of {sessions} sessions, seed {seed}")


if __name__ == "__main__":
    typer.run(main)
