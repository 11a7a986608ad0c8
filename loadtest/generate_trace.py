"""Generates traces in the Mooncake format: `.venv/bin/python -m loadtest.generate_trace --out FILE`.

Conversations start at random times (Poisson, or in bursts) and share one preamble block. Turns are geometric in number,
lengths log-normal (or as in `loadtest.bursts`), and a turn follows after reading the answer and typing. No number is
taken from a published trace; `--like FILE` takes rate and burstiness from one.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Annotated, Literal

import typer

from loadtest.bursts import Burstiness, ZipfLengths, answer_tokens, fit
from loadtest.sessions import find_sessions
from loadtest.traces import MOONCAKE_BLOCK_TOKENS, TraceError, TraceRequest, read_trace
from loadtest.typist import READ_WORDS_PER_S, TOKENS_PER_WORD, typing_times

#: Assumed speed of answers in a generated trace.
_ANSWER_TOKENS_PER_S = 40.0
_MAX_TURNS = 12


Lengths = Literal["log-normal", "zipf"]
#: Share of a trace's conversations to fit: the last ones are sparse, as the trace was cut off.
_FITTED_SHARE = 0.95
#: Mean answer with Zipf lengths.
_MEAN_ANSWER_TOKENS = 270.0


def generate(
    sessions: int,
    seed: int,
    sessions_per_s: float = 0.4,
    mean_turns: float = 3.0,
    mean_prompt_tokens: float = 3000.0,
    burstiness: float = 1.0,
    lengths: Lengths = "log-normal",
) -> list[dict[str, object]]:
    """Lines of a Mooncake trace, in order of arrival: `timestamp` (ms), `input_length`, `output_length`, `hash_ids`.

    burstiness: the shape of the gamma distribution of the gaps between conversations' starts; 1 is Poisson, less is
    burstier.
    """
    rng = random.Random(seed)
    bursts = None if burstiness == 1.0 else Burstiness(burstiness, sessions_per_s)
    # First prompts are long (documents, instructions), later ones short.
    zipf = [ZipfLengths(mean_prompt_tokens), ZipfLengths(0.04 * mean_prompt_tokens)] if lengths == "zipf" else None
    next_block = 1
    requests: list[tuple[float, int, int, list[int]]] = []
    start_s = 0.0
    for index in range(sessions):
        start_s += bursts.gap(rng) if bursts else rng.expovariate(sessions_per_s)
        turns = 1
        while turns < _MAX_TURNS and rng.random() > 1 / mean_turns:
            turns += 1
        pauses = typing_times(turns, seed=seed * 1_000_003 + index)
        at, tokens, full = start_s, 0, [0]
        for turn in range(turns):
            if zipf:
                tokens += zipf[turn > 0].draw(rng)
                answer = answer_tokens(rng, _MEAN_ANSWER_TOKENS)
            else:
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


def generated_requests(
    sessions: int,
    seed: int,
    sessions_per_s: float = 0.4,
    mean_turns: float = 3.0,
    mean_prompt_tokens: float = 3000.0,
    burstiness: float = 1.0,
    lengths: Lengths = "log-normal",
) -> list[TraceRequest]:
    """The requests of `generate`, as `read_trace` would return them."""
    found = []
    for line in generate(sessions, seed, sessions_per_s, mean_turns, mean_prompt_tokens, burstiness, lengths):
        at_ms, asked, answered, ids = line["timestamp"], line["input_length"], line["output_length"], line["hash_ids"]
        assert isinstance(at_ms, int) and isinstance(asked, int) and isinstance(answered, int) and isinstance(ids, list)
        found.append(TraceRequest(at_ms / 1000, asked, answered, tuple(ids)))
    return found


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
    burstiness: Annotated[
        float, typer.Option(help="gamma shape of the gaps; 1 is Poisson, less is burstier", min=0.01)
    ] = 1.0,
    lengths: Annotated[str, typer.Option(help="log-normal or zipf")] = "log-normal",
    like: Annotated[Path | None, typer.Option(help="a trace to take rate and burstiness of conversations from")] = None,
) -> None:
    """Write a trace of generated conversations in the Mooncake format."""
    if lengths not in ("log-normal", "zipf"):
        raise typer.BadParameter(f"--lengths {lengths!r}: give log-normal or zipf")
    if like is not None:
        try:
            starts = [s.turns[0].arrival_s for s in find_sessions(read_trace(like))]
            fitted = fit(starts[: round(_FITTED_SHARE * len(starts))])
        except (TraceError, OSError, ValueError) as e:
            raise typer.BadParameter(f"--like {like}: {e}") from e
        sessions_per_s, burstiness = fitted.per_s, fitted.shape
        typer.echo(f"{like}: {fitted.per_s:.3f} conversations/s, gamma shape {fitted.shape:.3f}")
    kind: Lengths = "zipf" if lengths == "zipf" else "log-normal"
    lines = generate(sessions, seed, sessions_per_s, mean_turns, mean_prompt_tokens, burstiness, kind)
    write(out, lines)
    typer.echo(f"{out}: {len(lines)} requests of {sessions} sessions, seed {seed}")


if __name__ == "__main__":
    typer.run(main)
