"""Training data as tokens, and which of them are learnt.

Of `messages`, the assistant's turns are learnt, each up to its end-of-turn token: a turn is what the chat template
renders after the prompt that would ask for it. So a conversation, rendered up to any turn, must begin like the whole
one; templates that change earlier turns (Qwen3 removes their reasoning) are refused unless only the last turn is
learnt. Of `text`, all is learnt; special tokens that it spells out are taken as such.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from blake3 import blake3

from contracts.errors import ConfigError, InvalidRequest
from contracts.training_data import parse_line, read_lines, refused
from worker.harvest.gate import OPEN, Gate, within
from worker.text.codec import TextCodec

#: Tokens at the end of a rendered prompt that may merge with what follows.
_MERGED = 1
_REASON_CHARACTERS = 200


class Examples:
    """Tokens of all examples, 5 bytes each. A target is a token that is learnt; the row before it predicts it."""

    def __init__(self, tokens: Sequence[np.ndarray], targets: Sequence[np.ndarray]) -> None:
        """tokens: int32 of each example; targets: bool of each token."""
        self._ends = np.cumsum([len(t) for t in tokens], dtype=np.int64)
        self._tokens = np.concatenate(tokens).astype(np.int32)
        self._targets = np.concatenate(targets).astype(np.bool_)
        self._targets[np.concatenate(([0], self._ends[:-1]))] = False  # no row predicts a first token

    def __len__(self) -> int:
        return len(self._ends)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each example."""
        return [int(n) for n in np.diff(self._ends, prepend=0)]

    def tokens(self, example: int) -> torch.Tensor:
        """int64 `[tokens]`."""
        return torch.from_numpy(self._tokens[self._slice(example)].astype(np.int64))

    def targets(self, example: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows that predict a target, and the targets; int64 `[targets]`."""
        here = self._slice(example)
        at = np.flatnonzero(self._targets[here])
        return torch.from_numpy(at - 1), torch.from_numpy(self._tokens[here][at].astype(np.int64))

    def target_count(self, example: int) -> int:
        """Number of targets of an example."""
        return int(self._targets[self._slice(example)].sum())

    def digest(self) -> bytes:
        """32 bytes over everything that is learnt."""
        found = blake3(b"upbeat training data")
        for array in (self._ends, self._tokens, self._targets):
            found.update(array.tobytes())
        return found.digest()

    def _slice(self, example: int) -> slice:
        return slice(int(self._ends[example - 1]) if example else 0, int(self._ends[example]))


class Reader:
    """Turns lines of training data into tokens."""

    def __init__(
        self,
        codec: TextCodec,
        eos_ids: set[int],
        vocab_size: int,
        max_tokens: int,
        gate: Gate = OPEN,
        created_s: float = 0.0,
    ) -> None:
        """max_tokens: an example's longer rest is cut off. gate: each line, and each turn of a conversation, is a unit,
        of some milliseconds for usual ones. created_s: the time that templates see, so that a job reads the same tokens
        on every day; wall clock."""
        self._codec, self._eos_ids, self._vocab_size = codec, eos_ids, vocab_size
        self._max_tokens, self._gate = max_tokens, gate
        self._variables = {"strftime_now": datetime.fromtimestamp(created_s, UTC).strftime}

    def read(self, path: Path) -> Examples:
        """The examples of the file at `path`. Raises InvalidRequest with the line's number and a remedy, ConfigError
        when the file cannot be read, and Stopped."""
        tokens, targets = [], []
        try:
            with path.open("rb") as file:
                for number, line in read_lines(file):
                    with within(self._gate):
                        example = parse_line(line, number)
                    ids, learnt = self.example(example, number)
                    tokens.append(ids)
                    targets.append(learnt)
        except OSError as e:
            raise ConfigError(f"{path} cannot be read: {e.strerror}; give a path that all nodes see") from e
        return Examples(tokens, targets)

    def example(self, line: dict[str, Any], number: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens, and whether each is learnt, of a checked line. Raises InvalidRequest."""
        try:
            if "text" in line:
                with within(self._gate):
                    ids = self._codec.encode(line["text"])
                spans = [(0, len(ids))]
            else:
                ids, spans = self._conversation(line["messages"], number)
        except InvalidRequest as e:
            if e.param == "training_file":
                raise
            reason = e.message.replace(" and chat_template_kwargs", "")
            raise refused(number, f"{reason[:_REASON_CHARACTERS]}; change its messages") from e
        if max(ids, default=0) >= self._vocab_size:
            raise refused(number, f"has token {max(ids)}, which the model lacks; use the model's own tokenizer")
        tokens, learnt = np.array(ids[: self._max_tokens], dtype=np.int32), np.zeros(len(ids), dtype=np.bool_)
        for start, end in spans:
            learnt[start:end] = True
        learnt = learnt[: len(tokens)]
        if not learnt[1:].any():
            raise refused(
                number,
                f"has nothing to learn within its first {self._max_tokens} tokens (of {len(ids)}); shorten it or raise "
                "max_tokens",
            )
        return tokens, learnt

    def _conversation(self, messages: list[dict[str, Any]], number: int) -> tuple[list[int], list[tuple[int, int]]]:
        """Tokens of a conversation, and the spans of the turns that are learnt; spans after `max_tokens` may miss."""
        plain = [{key: value for key, value in message.items() if key != "weight"} for message in messages]
        whole = self._render(plain)
        spans = []
        for i, message in enumerate(messages):
            if message["role"] != "assistant" or message.get("weight", 1) == 0:
                continue
            asked = self._render(plain[:i], asks=True)
            start = self._common(asked, whole, i, number)
            if start >= self._max_tokens:
                break
            last = i == len(messages) - 1
            end = len(whole) if last else self._common(self._render(plain[: i + 1]), whole, i, number)
            ends = [at for at in range(start, end) if whole[at] in self._eos_ids]
            spans.append((start, ends[-1] + 1 if ends else end))
        return whole, spans

    def _render(self, messages: list[dict[str, Any]], asks: bool = False) -> list[int]:
        with within(self._gate):
            return self._codec.render(messages, variables=self._variables, add_generation_prompt=asks)

    def _common(self, beginning: list[int], whole: list[int], turn: int, number: int) -> int:
        """Number of tokens with which both begin: all of `beginning`, but for one that merged with what follows."""
        pairs = zip(beginning, whole, strict=False)
        count = next((at for at, (ours, theirs) in enumerate(pairs) if ours != theirs), min(len(beginning), len(whole)))
        if count < len(beginning) - _MERGED:
            raise refused(
                number,
                f"the model's chat template renders the conversation up to messages[{turn}] otherwise than within the "
                "whole; learn only the last turn of a line (weight 0 on the others, or a line a turn)",
            )
        return count
