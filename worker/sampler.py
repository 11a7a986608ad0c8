"""How the next token is chosen from its logits.

A draw depends on (seed, position) and the row's own logits only: not on what shares the batch, nor on whether the request
was resumed elsewhere. The token is found by walking the probabilities in the order of token ids with one uniform number,
so that rounding differences between batches can hardly change it.

Order, as in the field: logit bias and penalties, temperature, then min_p, top_k and top_p on what is left. Reported log
probabilities are the model's own, before any of it.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from blake3 import blake3

from contracts.request import Sampling

_BELOW_ONE = 1.0 - 2.0**-53


@dataclass(slots=True)
class SamplingState:
    """One request's sampling: its settings, a seed that is never None, and how often each token was generated."""

    sampling: Sampling
    seed: int
    prompt_tokens: int
    generated: Counter[int]
    position: int

    @classmethod
    def start(cls, sampling: Sampling, prompt: Sequence[int], resume: Sequence[int] = ()) -> SamplingState:
        """The state after `prompt`, with `resume` generated elsewhere already. Without a seed, one is drawn."""
        seed = sampling.seed if sampling.seed is not None else secrets.randbits(63)
        return cls(sampling, seed, len(prompt), Counter(resume), len(resume))

    def took(self, token: int) -> None:
        """Records that `token` was chosen."""
        self.generated[token] += 1
        self.position += 1

    @property
    def plain(self) -> bool:
        """Whether the logits are used as they are."""
        s = self.sampling
        return not (s.logit_bias or s.presence_penalty or s.frequency_penalty)

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
    """A row with bias and penalties applied: presence once for every token generated before, frequency for each time."""
    s = state.sampling
    if state.plain:
        return logits
    row = logits.clone()
    inside = {token: bias for token, bias in s.logit_bias.items() if 0 <= token < row.shape[0]}
    if inside:
        row[list(inside)] += torch.tensor(list(inside.values()), dtype=row.dtype)
    if state.generated and (s.presence_penalty or s.frequency_penalty):
        counts = torch.tensor(list(state.generated.values()), dtype=row.dtype)
        row[list(state.generated)] -= s.presence_penalty + s.frequency_penalty * counts
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
