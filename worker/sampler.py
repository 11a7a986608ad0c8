"""How the next token is chosen from its logits.

A draw depends on (seed, position) and the row's own logits only: not on what shares the batch, nor on whether the request
was resumed elsewhere. The token is found by walking the probabilities in the order of token ids with one uniform number,
so that rounding differences between batches can hardly change it.

Order, as in the field: logit bias, repetition penalty, presence and frequency penalties, then what may not come (the grammar's
mask, ends before min_tokens), temperature, and min_p, top_k and top_p on what is left. Reported log probabilities are the
model's own, before any of it.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from blake3 import blake3

from contracts.request import Sampling

_BELOW_ONE = 1.0 - 2.0**-53


class Constraint(Protocol):
    """What limits a request's tokens to those that its grammar allows next."""

    def allowed(self) -> torch.Tensor:
        """Bool `[vocab]`, never none; the same until `took`."""
        ...

    def took(self, token: int) -> None:
        """Records that `token` was chosen."""
        ...


@dataclass(slots=True)
class SamplingState:
    """One request's sampling: its settings, a seed that is never None, and how often each token was generated.

    ends: tokens that would end the answer. seen: distinct tokens of prompt and answer, kept only with a repetition penalty;
    `seen_ids` has the same as a tensor, so that a step does not go through a long prompt again.
    """

    sampling: Sampling
    seed: int
    generated: Counter[int]
    position: int
    ends: frozenset[int] = frozenset()
    constraint: Constraint | None = None
    seen: set[int] = field(default_factory=set)
    seen_ids: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))

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
        ids = torch.tensor(sorted(seen), dtype=torch.int64)
        return cls(sampling, seed, Counter(resume), len(resume), ends | {*sampling.stop_token_ids}, constraint, seen, ids)

    def took(self, token: int) -> None:
        """Records that `token` was chosen."""
        self.generated[token] += 1
        self.position += 1
        if self.sampling.repetition_penalty != 1 and token not in self.seen:
            self.seen.add(token)
            self.seen_ids = torch.cat([self.seen_ids, torch.tensor([token])])
        if self.constraint is not None:
            self.constraint.took(token)

    @property
    def early(self) -> bool:
        """Whether the answer may not end yet."""
        return self.position < self.sampling.min_tokens

    @property
    def plain(self) -> bool:
        """Whether the logits are used as they are."""
        s = self.sampling
        penalties = s.presence_penalty or s.frequency_penalty or s.repetition_penalty != 1
        return not (s.logit_bias or penalties or self.early or self.constraint is not None)

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
        best = logits.argmax(dim=-1).tolist()  # the first of equals
        choices = []
        for row, state in enumerate(requests):
            token = best[row]
            if state.sampling.temperature > 0 or not state.plain:
                adjusted = adjust(logits[row], state)
                token = draw(adjusted, state) if state.sampling.temperature > 0 else int(adjusted.argmax())
            choices.append(Choice(token))
        asked = [row for row, state in enumerate(requests) if state.sampling.logprobs is not None]
        if asked:
            logprobs = logits[asked].log_softmax(dim=-1)
            for at, row in enumerate(asked):
                choices[row] = _with_logprobs(choices[row].token, logprobs[at], requests[row].sampling.logprobs or 0)
        return choices


def adjust(logits: torch.Tensor, state: SamplingState) -> torch.Tensor:
    """A row with biases and penalties applied, and what may not come at minus infinity. Presence counts once for every token
    generated before, frequency for each time; repetition scales the logits of tokens of prompt and answer (Keskar et al., CTRL)."""
    s = state.sampling
    if state.plain:
        return logits
    row, vocabulary = logits.clone(), logits.shape[0]
    inside = {token: bias for token, bias in s.logit_bias.items() if 0 <= token < vocabulary}
    if inside:
        row[list(inside)] += torch.tensor(list(inside.values()), dtype=row.dtype)
    if state.seen:
        known = row[state.seen_ids]
        row[state.seen_ids] = torch.where(known > 0, known / s.repetition_penalty, known * s.repetition_penalty)
    if state.generated and (s.presence_penalty or s.frequency_penalty):
        counts = torch.tensor(list(state.generated.values()), dtype=row.dtype)
        row[list(state.generated)] -= s.presence_penalty + s.frequency_penalty * counts
    if state.early:
        row[torch.tensor([token for token in state.ends if 0 <= token < vocabulary], dtype=torch.int64)] = float("-inf")
    if state.constraint is not None:
        row.masked_fill_(~state.constraint.allowed(), float("-inf"))
    return row


def draw(row: torch.Tensor, state: SamplingState) -> int:
    """A token drawn from the row's distribution, as `state` limits it."""
    s = state.sampling
    scaled = (row.double() - row.max()) / s.temperature
    if s.min_p > 0 or 0 < s.top_k < row.shape[0] or s.top_p < 1:
        scaled = scaled.masked_fill(~allowed(scaled, s), float("-inf"))
    walked = scaled.softmax(dim=-1).cumsum(dim=-1)
    target = min(state.uniform(), _BELOW_ONE) * walked[-1]
    return int(torch.searchsorted(walked, target, right=True).clamp(max=row.shape[0] - 1))


def allowed(scaled: torch.Tensor, s: Sampling) -> torch.Tensor:
    """Which tokens may be drawn, bool `[vocab]`; never none. Among equals at the border of top_k and top_p, lower ids stay."""
    order = scaled.sort(descending=True, stable=True)
    count = scaled.shape[0]
    if s.min_p > 0:
        least = torch.log(torch.tensor(s.min_p, dtype=scaled.dtype)) + order.values[0]
        count = int((order.values >= least).sum())
    if s.top_k > 0:
        count = min(count, s.top_k)
    count = max(count, 1)
    if s.top_p < 1:
        before = order.values[:count].softmax(dim=-1).cumsum(dim=-1)
        count = min(count, int((before < s.top_p).sum()) + 1)
    kept = torch.zeros(scaled.shape[0], dtype=torch.bool)
    kept[order.indices[:count]] = True
    return kept


def _with_logprobs(token: int, logprobs: torch.Tensor, count: int) -> Choice:
    top = []
    if count:
        best = logprobs.topk(min(count, logprobs.shape[0]))
        top = list(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    return Choice(token, float(logprobs[token]), top)
