"""Chooses the next token from its logits.

A draw depends only on seed, position and the row's logits, not on the batch or on a resumption on another worker
(`worker.sampling.drawing`).

Usual order: logit bias, repetition penalty, presence and frequency penalties, forbidden tokens (the grammar's mask,
ends before min_tokens), temperature, min_p, top_k, top_p. Reported log probabilities are the model's, before all of
these.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from contracts.errors import InvalidRequest
from contracts.request import Sampling
from worker.core.faults import NoFiniteLogits
from worker.core.token_counts import Repetition, Row, TokenCounts
from worker.sampling.drawing import draw

_NEVER = np.float32(-np.inf)


class Constraint(Protocol):
    """Limits a request's next token to those that its grammar allows."""

    def allowed(self) -> npt.NDArray[np.bool_]:
        """Allowed tokens, bool `[vocab]`, at least one; unchanged until `took`."""
        ...

    def took(self, token: int) -> None:
        """Records that `token` was chosen."""
        ...


@dataclass(slots=True)
class SamplingState:
    """One request's sampling: settings, seed, and what was generated so far.

    ends: tokens that end the answer. generated, repeated: None unless a penalty needs them. biases: token ids and
    values added to their logits.
    """

    sampling: Sampling
    seed: int
    position: int
    ends: frozenset[int] = frozenset()
    constraint: Constraint | None = None
    generated: TokenCounts | None = None
    repeated: Repetition | None = None
    biases: tuple[npt.NDArray[np.int64], Row] | None = None

    @classmethod
    def start(
        cls,
        sampling: Sampling,
        prompt: Sequence[int],
        resume: Sequence[int] = (),
        ends: frozenset[int] = frozenset(),
        constraint: Constraint | None = None,
    ) -> SamplingState:
        """The state after `prompt` and `resume`, tokens generated elsewhere (which `constraint` has taken). Without a
        seed, a random one is used."""
        state = cls(
            sampling,
            sampling.seed if sampling.seed is not None else secrets.randbits(63),
            len(resume),
            ends | {*sampling.stop_token_ids},
            constraint,
        )
        if sampling.presence_penalty or sampling.frequency_penalty:
            state.generated = TokenCounts(resume)
        if sampling.repetition_penalty != 1:
            state.repeated = Repetition(sampling.repetition_penalty, [*prompt, *resume])
        if sampling.logit_bias:
            ids, values = zip(*sampling.logit_bias.items(), strict=True)
            state.biases = np.array(ids, np.int64), np.array(values, np.float32)
        return state

    def took(self, token: int) -> None:
        """Records that `token` was chosen."""
        self.position += 1
        if self.generated is not None:
            self.generated.add(token)
        if self.repeated is not None:
            self.repeated.add(token)
        if self.constraint is not None:
            self.constraint.took(token)

    @property
    def early(self) -> bool:
        """Whether the answer may not end yet."""
        return self.position < self.sampling.min_tokens

    @property
    def only_constrained(self) -> bool:
        """Whether only a constraint can change the logits."""
        return self.biases is None and self.generated is None and self.repeated is None and not self.early

    def uniform(self) -> float:
        """The random number in [0, 1) for this position."""
        drawn = blake3(f"upbeat sampling {self.seed} {self.position}".encode()).digest(length=8)
        return (int.from_bytes(drawn, "little") >> 11) * 2.0**-53


@dataclass(slots=True)
class Choice:
    """The chosen token; with logprobs, its log probability and the best alternatives `(id, logprob)`."""

    token: int
    logprob: float | None = None
    top: list[tuple[int, float]] | None = None


def choose(row: Row, state: SamplingState) -> Choice:
    """The next token of a row of logits (float32 `[vocab]`). Modifies neither row nor state; call `took` afterwards.

    Raises InvalidRequest with code generation_failed when no token can be chosen, or NoFiniteLogits when the model's
    logits are the cause.
    """
    adjusted, sampling = adjust(row, state), state.sampling
    likeliest = int(adjusted.argmax())  # the first of equals, or the first NaN
    if not math.isfinite(adjusted[likeliest]):
        raise _nothing_to_choose(row, state)
    token = draw(adjusted, sampling, state.uniform()) if sampling.temperature > 0 else likeliest
    return Choice(token) if sampling.logprobs is None else _with_logprobs(token, row, sampling.logprobs)


def _nothing_to_choose(row: Row, state: SamplingState) -> InvalidRequest:
    """Why no token of the row can be chosen."""
    if not math.isfinite(row.max()):
        return NoFiniteLogits()
    s = state.sampling
    given = {
        "repetition_penalty": s.repetition_penalty != 1,
        "frequency_penalty": s.frequency_penalty != 0,
        "presence_penalty": s.presence_penalty != 0,
        "logit_bias": bool(s.logit_bias),
        "min_tokens": state.early,
        "response_format or tools": state.constraint is not None,
    }
    causes = [name for name, is_given in given.items() if is_given]
    param = causes[0] if len(causes) == 1 and state.constraint is None else None
    return InvalidRequest(
        f"no token can be chosen with these values of {', '.join(causes)}", param=param, code="generation_failed"
    )


def adjust(logits: Row, state: SamplingState) -> Row:
    """A row with biases and penalties applied; forbidden tokens are minus infinity. The presence penalty applies once
    per generated token id, the frequency penalty once per occurrence."""
    s, constraint = state.sampling, state.constraint
    if state.only_constrained:
        return logits if constraint is None else np.where(constraint.allowed(), logits, _NEVER)
    row, vocabulary = logits.copy(), len(logits)
    if state.biases is not None:
        ids, values = state.biases
        if len(ids) and ids.max() >= vocabulary:
            known = ids < vocabulary
            ids, values = state.biases = ids[known], values[known]
        row[ids] += values
    if state.repeated is not None:
        state.repeated.apply(row)
    if state.generated is not None:
        row[state.generated.ids] -= (
            np.float32(s.presence_penalty) + np.float32(s.frequency_penalty) * state.generated.counts
        )
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
