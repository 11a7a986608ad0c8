"""Token counts as arrays, so that a penalty costs a few array operations per token, however long the text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

#: With more distinct tokens than this, a factor for the whole vocabulary is faster than indexing the row.
DENSE = 8192
_FIRST_ROOM = 64
Row = npt.NDArray[np.float32]


class TokenCounts:
    """Distinct tokens and their counts. `add` takes amortised constant time."""

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        ids, counts = np.unique(np.asarray(tokens, np.int64), return_counts=True)
        self._size = len(ids)
        self._ids, self._counts = ids, counts.astype(np.float32)
        self._place = {token: place for place, token in enumerate(ids.tolist())}

    def add(self, token: int) -> bool:
        """Count one more occurrence. True if it is the first."""
        place = self._place.get(token)
        if place is not None:
            self._counts[place] += 1
            return False
        if self._size == len(self._ids):
            more = max(self._size, _FIRST_ROOM)
            self._ids = np.concatenate((self._ids, np.empty(more, np.int64)))
            self._counts = np.concatenate((self._counts, np.empty(more, np.float32)))
        self._place[token] = self._size
        self._ids[self._size], self._counts[self._size] = token, 1
        self._size += 1
        return True

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """`[distinct]`, a view."""
        return self._ids[: self._size]

    @property
    def counts(self) -> Row:
        """`[distinct]`, a view."""
        return self._counts[: self._size]


class Repetition:
    """The repetition penalty (Keskar et al., CTRL): logits of tokens in prompt and answer are divided by it if
    positive, else multiplied."""

    def __init__(self, penalty: float, tokens: Sequence[int]) -> None:
        self._penalty, self._seen = np.float32(penalty), TokenCounts(tokens)
        #: Penalty or 1 for each token of the vocabulary, once more than `DENSE` distinct tokens were seen.
        self._factors: Row | None = None

    def add(self, token: int) -> None:
        """The token was generated."""
        if self._seen.add(token) and self._factors is not None:
            self._factors[token] = self._penalty

    def apply(self, row: Row) -> None:
        """Apply the penalty to `row` (float32 `[vocab]`) in place."""
        if len(self._seen.ids) <= DENSE:
            known = row[self._seen.ids]
            row[self._seen.ids] = np.where(known > 0, known / self._penalty, known * self._penalty)
            return
        if self._factors is None:
            self._factors = np.ones(len(row), np.float32)
            self._factors[self._seen.ids] = self._penalty
        # For a penalty above 1 the smaller of the two is right for either sign of the logit; below 1, the larger.
        pick = np.minimum if self._penalty > 1 else np.maximum
        pick(row / self._factors, row * self._factors, out=row)
