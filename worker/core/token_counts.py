"""How often tokens came, kept as arrays: a penalty costs a few array operations a token, however long prompt and answer are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

#: With more distinct tokens than this, a factor for every token of the vocabulary is cheaper than picking theirs out of the row.
DENSE = 8192
_FIRST_ROOM = 64
Row = npt.NDArray[np.float32]


class TokenCounts:
    """Distinct tokens and how often each came. `add` costs the same however many there are."""

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        ids, counts = np.unique(np.asarray(tokens, np.int64), return_counts=True)
        self._size = len(ids)
        self._ids, self._counts = ids, counts.astype(np.float32)
        self._place = {token: place for place, token in enumerate(ids.tolist())}

    def add(self, token: int) -> bool:
        """The token came once more. True when it is the first time."""
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
    """The repetition penalty (Keskar et al., CTRL): logits of tokens of prompt and answer are divided by it where they are positive, else
    multiplied."""

    def __init__(self, penalty: float, tokens: Sequence[int]) -> None:
        self._penalty, self._seen = np.float32(penalty), TokenCounts(tokens)
        #: The penalty or 1 for each token of the vocabulary, once `DENSE` tokens were seen.
        self._factors: Row | None = None

    def add(self, token: int) -> None:
        """The token was generated."""
        if self._seen.add(token) and self._factors is not None:
            self._factors[token] = self._penalty

    def apply(self, row: Row) -> None:
        """Changes `row` (float32 `[vocab]`)."""
        if len(self._seen.ids) <= DENSE:
            known = row[self._seen.ids]
            row[self._seen.ids] = np.where(known > 0, known / self._penalty, known * self._penalty)
            return
        if self._factors is None:
            self._factors = np.ones(len(row), np.float32)
            self._factors[self._seen.ids] = self._penalty
        # The smaller of the two is the right one for a penalty above 1, whatever the logit's sign; the larger for one below.
        pick = np.minimum if self._penalty > 1 else np.maximum
        pick(row / self._factors, row * self._factors, out=row)
