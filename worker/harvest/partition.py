"""How large the units of a job are: measured once, at the job's start, and kept in its checkpoints, since another
partition rounds differently.

A unit of a layer has `rows` tokens of an example; one of the head has `head_rows` tokens and `columns` tokens of the
vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from runtime.model_config import ModelConfig
from worker.harvest.adapter import Adapter, plain_empty
from worker.harvest.gate import Frozen, Gate
from worker.harvest.head import HeadPass, HeadScratch
from worker.harvest.lanes import Chain, Lanes
from worker.harvest.lora import Dropout, Pass, Scratch
from worker.models.llama import RopeTable

W = TypeVar("W")
#: A unit's time on one core (HARLI, section 6: layer-wise units of about 10 ms).
UNIT_S = 0.010
LEAST_ROWS, MOST_ROWS = 8, 1024
_LEAST_COLUMNS = 256
#: Of the logits of a unit of the head.
_LOGITS_BYTES = 32 << 20
_TIMES = 3


@dataclass(frozen=True, slots=True)
class Partition:
    """The sizes of units; all are powers of two."""

    rows: int
    head_rows: int
    columns: int


def head_rows(config: ModelConfig, rows: int) -> int:
    """Rows of a unit of the head: `rows`, or as many as need at most 32 MiB of logits, but at least 8."""
    fits = max(LEAST_ROWS, _LOGITS_BYTES // (4 * config.vocab_size))
    return min(rows, 1 << (fits.bit_length() - 1))


def unit_rows(
    config: ModelConfig,
    adapter: Adapter,
    dropout: float,
    longest: int,
    frozen: Frozen,
    gate: Gate,
    limit_s: float = UNIT_S,
) -> Partition:
    """The largest partition of which no unit takes more than `limit_s` for an example of `longest` tokens; at least 8
    rows and 256 columns, even if they take longer. Computes units on one lane of `gate`; takes seconds at most."""
    measured = _Measured(config, adapter, dropout, longest, frozen, gate)
    try:
        rows = LEAST_ROWS
        while rows < min(MOST_ROWS, longest) and measured.layer_s(2 * rows) <= limit_s:
            rows *= 2
        head = head_rows(config, rows)
        columns = _LEAST_COLUMNS
        while columns < config.vocab_size and measured.head_s(head, 2 * columns) <= limit_s:
            columns *= 2
        while head > LEAST_ROWS and measured.head_s(head, columns) > limit_s:
            head //= 2
        return Partition(rows, head, columns)
    finally:
        measured.close()


class _Measured:
    """Times units of an example of `longest` tokens: those of its last rows, which attend to most."""

    def __init__(
        self, config: ModelConfig, adapter: Adapter, dropout: float, longest: int, frozen: Frozen, gate: Gate
    ) -> None:
        self._config, self._adapter, self._longest, self._frozen = config, adapter, longest, frozen
        self._dtype = frozen.top().embedding.dtype
        self._dropout = Dropout(dropout, (0,))
        self._rope = RopeTable(config, self._dtype).at(torch.arange(longest), longest)
        self._scratch = Scratch(config, longest, self._dtype, plain_empty)
        for tensor in (self._scratch.q, self._scratch.k, self._scratch.v):
            tensor.normal_()
        self._scratch.dk.zero_()
        self._scratch.dv.zero_()
        # All layers but those without a window are as fast or faster.
        self._layer = next((n for n, window in enumerate(config.windows) if window is None), 0)
        self._lanes = Lanes(1, gate)

    def close(self) -> None:
        self._lanes.close()

    def layer_s(self, rows: int) -> float:
        """Seconds of the slowest unit of a layer: that of a backward pass."""
        layer, longest = self._layer, self._longest
        way = Pass(
            self._config, layer, self._rope, rows, self._adapter.layers[layer], self._adapter.scale, self._dropout
        )
        x = torch.randn(longest, self._config.hidden_size, dtype=self._dtype)
        dx = torch.randn_like(x)
        grads = self._adapter.shapes.views(torch.zeros(self._adapter.shapes.count))
        units = list(way.backward(x, dx, grads, self._scratch))
        each = len(units) // 3  # project, finish and its product, the product of project
        slowest = (units[2 * each - 1], units[-1])
        self._frozen.next(layer, True)
        return self._seconds(slowest, lambda: self._frozen.acquire(layer), lambda: self._frozen.release(layer))

    def head_s(self, rows: int, columns: int) -> float:
        """Seconds of the slowest unit of the head."""
        at = torch.arange(min(rows, self._longest))
        scratch = HeadScratch(self._config, rows, self._dtype, plain_empty)
        way = HeadPass(self._config, at, torch.zeros_like(at), rows, columns)
        x = torch.randn(len(at), self._config.hidden_size, dtype=self._dtype)
        units = list(way.loss(x, [], scratch, torch.empty_like(x)))
        blocks = -(-self._config.vocab_size // columns)
        return self._seconds((units[0], units[1], units[1 + blocks], units[2 + blocks]), self._frozen.top)

    def _seconds(
        self, units: Sequence[Callable[[W], None]], lend: Callable[[], W], give_back: Callable[[], None] = lambda: None
    ) -> float:
        """The slowest unit's; of each the second best of three, so that one disturbance does not count."""

        def timed(unit: Callable[[W], None], found: list[float]) -> Chain[W]:
            for _ in range(_TIMES):

                def run(lent: W) -> None:
                    began = time.thread_time()
                    unit(lent)
                    found.append(time.thread_time() - began)

                yield run

        slowest = 0.0
        for unit in units:
            found: list[float] = []
            self._lanes.run([timed(unit, found)], lend, give_back)
            slowest = max(slowest, sorted(found)[1])
        return slowest
