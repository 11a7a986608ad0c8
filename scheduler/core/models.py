"""Load and memory by (model, device): one worker's last report, and all devices as columns with a row each.

The work of a device as a whole, which its models share, is in `columns`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from contracts.models import ModelState
from contracts.residency import MayLend

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class ModelLoad:
    """One model's part of a worker's report; sizes are on the device, in bytes.

    outstanding_tokens, by_priority, request_s, prefill_token_s: as in `device.LoadReport`. token_rate: admitted prompt
    tokens and decoded tokens a second. kv_bytes_used: neither free nor evictable. kv_bytes_cached: evictable. idle_s:
    time since its last request ended. activation_s: time to bring it onto the device, or what is left of that.
    layers_lent: to KV; may_lend: for users, not for decisions; None: not said, or nothing is ever lent.
    """

    state: ModelState = ModelState.ACTIVE
    running: int = 0
    waiting: int = 0
    outstanding_tokens: float = 0.0
    by_priority: Mapping[int, float] = field(default_factory=dict)
    request_s: float = 0.0
    prefill_token_s: float = 0.0
    token_rate: float = 0.0
    kv_bytes_used: int = 0
    kv_bytes_cached: int = 0
    kv_bytes_limit: int = 0
    layers_lent: int = 0
    idle_s: float = 0.0
    activation_s: float = 0.0
    may_lend: MayLend | None = None


class ModelView(NamedTuple):
    """One model on all devices, at one time. serves: active there, or activated when a request comes, in
    `activation_s`. here: its weights are there, or on their way. Where unknown, prefill_token_s is infinite and
    request_s is 0."""

    serves: Flags
    here: Flags
    kv_total_bytes: Floats
    kv_free_bytes: Floats
    prefill_token_s: Floats
    request_s: Floats
    activation_s: Floats


class ModelColumns:
    """One model's columns. Arrays may be longer than the number of devices."""

    def __init__(self, size: int) -> None:
        #: `ModelState`; 0: the device does not have it.
        self.state: npt.NDArray[np.int8] = np.zeros(size, np.int8)
        self.kv_total_bytes: Floats = np.zeros(size)
        self.kv_free_bytes: Floats = np.zeros(size)
        self.prefill_token_s: Floats = np.full(size, np.inf)
        self.request_s: Floats = np.zeros(size)
        self.activation_s: Floats = np.zeros(size)

    def grow(self) -> None:
        """Double the length of the arrays."""
        fresh = ModelColumns(len(self.state))
        for name, old in vars(self).items():
            setattr(self, name, np.concatenate([old, getattr(fresh, name)]))

    def take(self, row: int, load: ModelLoad | None) -> None:
        """Set the model's state on a device; None: the device does not have it."""
        load = load or ModelLoad(ModelState.UNKNOWN)
        self.state[row] = load.state
        self.kv_total_bytes[row] = load.kv_bytes_limit
        self.kv_free_bytes[row] = max(load.kv_bytes_limit - load.kv_bytes_used, 0)
        self.prefill_token_s[row] = load.prefill_token_s or np.inf
        self.request_s[row] = load.request_s
        self.activation_s[row] = load.activation_s

    def serves(self, rows: slice | int) -> Flags:
        """Whether requests for the model may go to these devices."""
        able: Flags = (self.state[rows] == ModelState.ACTIVE) | (self.activation_s[rows] > 0)
        return able

    def view(self, count: int) -> ModelView:
        """A copy of the first `count` rows."""
        arrays = (self.kv_total_bytes, self.kv_free_bytes, self.prefill_token_s, self.request_s, self.activation_s)
        state = self.state[:count]
        here = (state == ModelState.ACTIVE) | (state == ModelState.LOADING)
        return ModelView(self.serves(slice(count)), here, *(array[:count].copy() for array in arrays))
