"""How the next token is chosen from its logits.

A draw depends on (seed, position) and the row's own logits only: not on what shares the batch, nor on whether the request
was resumed elsewhere (`worker.drawing`).

Order, as in the field: logit bias, repetition penalty, presence and frequency penalties, then what may not come (the grammar's
mask, ends before min_tokens), temperature, and min_p, top_k and top_p on what is left. Reported log probabilities are the
model's own, before any of it.
"""

from __future__ import annotations

import math
import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from blake3 import blake3

from contracts.request import Sampling
from worker.drawing import Row, draw

_NEVER = np.float32(-np.inf)


class Constraint(Protocol):
    """What limits a request's tokens to those that its grammar allows next."""

    def allowed(self) -> npt.NDArray[np.bool_]:
        """Bool `[vocab]`, never none; the same until `took`."""
        ...

    def took(self, token: int) -> None:
        """Records that `token` was chosen."""
        ...


@dataclass(slots=True)
class SamplingState:
    """One request's sampling: its settings, a seed that is never None, and how often each token was generated.

    ends: tokens that would end the answer. seen: distinct tokens of prompt and answer, kept only with a repetition penalty;
    `seen_ids` has the same as an array, so that a step does not go through a long prompt again.
    """

    sampling: Sampling
    seed: int
    generated: Counter[int]
    position: int
    ends: frozenset[int] = frozenset()
    constraint: Constraint | None = None
    seen: set[int] = field(default_factory=set)
    seen_ids: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))

    @classmethod
    def start(
        cls,
        sampling: Sampling,
        prompt: Sequence[int],
        resume: Sequence[int] = (),
        ends: frozenset[int] = frozenset(),
        constraint: Constraint | None = None,
    ) -> SamplingState:
        """The state after `prompt`, with `resume` generated elsewhere already (`constraint` knows of it). Without a seed, one is
        drawn."""
        seed = sampling.seed if sampling.seed is not None else secrets.randbits(63)
        seen = {*prompt, *resume} if sampling.repetition_penalty != 1 else set()
        ids = np.array(sorted(seen), np.int64)
        return cls(sampling, seed, Counter(resume), len(resume), ends | {*sampling.stop_token_ids}, constraint, seen, ids)

    def took(self, token: int) -> None:
        """Records that `token` was chosen."""
        self.generated[token] += 1
        self.position += 1
        if self.sampling.repetition_penalty != 1 and token not in self.seen:
            self.seen.add(token)
            self.seen_ids = np.append(self.seen_ids, token)
        if self.constraint is not None:
            self.constraint.took(token)

    @property
    def early(self) -> bool:
        """Whether the answer may not end yet."""
        return self.position < self.sampling.min_tokens

    @property
    def only_constrained(self) -> bool:
        """Whether nothing but a constraint may change the logits."""
        s = self.sampling
        return not (s.logit_bias or s.presence_penalty or s.frequency_penalty or s.repetition_penalty != 1 or self.early)

    def uniform(self) -> float:
        """The number in [0, 1) that decides this position."""
        drawn = blake3(f"upbeat sampling {self.seed} {self.position}".encode()).digest(length=8)
        return (int.from_bytes(drawn, "little") >> 11) * 2.0**-53


@dataclass(slots=True)
class Choice:
    """The chosen token; with logprobs asked for, its log probability and the best alternatives `(id, logprob)`."""

    token: int
    logprob: float | None = None
    top: list[tuple[int, float]] | None = None


class Sampler:
    """Chooses one token a row. Keeps nothing between calls."""

    def choose(self, logits: torch.Tensor, requests: Sequence[SamplingState]) -> list[Choice]:
        """One Choice a row of `logits` (float32 `[n, vocab]`, left as it is). States are read, not changed: call `took`."""
        if logits.shape[0] != len(requests):
            raise ValueError(f"{logits.shape[0]} rows of logits for {len(requests)} requests")
        if not requests:
            return []
        choices = []
        for row, state in zip(logits.cpu().numpy(), requests, strict=True):
            adjusted = adjust(row, state)
            drawn = state.sampling.temperature > 0
            token = draw(adjusted, state.sampling, state.uniform()) if drawn else int(adjusted.argmax())  # the first of equals
            asked = state.sampling.logprobs
            choices.append(Choice(token) if asked is None else _with_logprobs(token, row, asked))
        return choices


def adjust(logits: Row, state: SamplingState) -> Row:
    """A row with biases and penalties applied, and what may not come at minus infinity. Presence counts once for every token
    generated before, frequency for each time; repetition scales the logits of tokens of prompt and answer (Keskar et al., CTRL)."""
    s, constraint = state.sampling, state.constraint
    if state.only_constrained:
        return logits if constraint is None else np.where(constraint.allowed(), logits, _NEVER)
    row, vocabulary = logits.copy(), len(logits)
    for token, bias in s.logit_bias.items():
        if 0 <= token < vocabulary:
            row[token] += bias
    if state.seen:
        known = row[state.seen_ids]
        row[state.seen_ids] = np.where(known > 0, known / s.repetition_penalty, known * s.repetition_penalty)
    if state.generated and (s.presence_penalty or s.frequency_penalty):
        ids = np.fromiter(state.generated.keys(), np.int64, len(state.generated))
        counts = np.fromiter(state.generated.values(), np.float32, len(ids))
        row[ids] -= np.float32(s.presence_penalty) + np.float32(s.frequency_penalty) * counts
    if state.early:
        row[[token for token in state.ends if 0 <= token < vocabulary]] = _NEVER
    if constraint is not None:
        row[~constraint.allowed()] = _NEVER
    return row


def _with_logprobs(token: int, row: Row, count: int) -> Choice:
    best = float(row.max())
    total = best + math.log(float(np.exp(row - np.float32(best)).sum(dtype=np.float64)))
    count = min(count, len(row))
    ids = np.argpartition(row, len(row) - count)[len(row) - count :] if count else np.empty(0, np.int64)
    ids = ids[np.lexsort((ids, -row[ids]))]
    return Choice(token, float(row[token]) - total, [(int(i), float(row[i]) - total) for i in ids])
