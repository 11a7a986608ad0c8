"""A model on a device: what its worker last reported, and the same of all devices as columns, a row each.

Load and memory are by (model, device), as a device may have several models; how much work it has altogether is in `columns`, as its
models share it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from contracts.models import ModelState

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class ModelLoad:
    """A model's part of a worker's report; sizes are of the device, in bytes.

    outstanding_tokens, by_priority, request_s, prefill_token_s: as in `fleet.Load`. token_rate: tokens a second, prompts that were newly
    admitted and decoded ones. kv_bytes_used: neither free nor purgeable; kv_bytes_cached: purgeable. idle_s: since its last request
    ended. activation_s: what bringing it onto the device takes, or still takes.
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


class ModelView(NamedTuple):
    """One model on all devices, at one time. serves: it is active there. prefill_token_s: infinite where nobody knows. request_s: 0 where
    nobody knows."""

    serves: Flags
    kv_total_bytes: Floats
    kv_free_bytes: Floats
    prefill_token_s: Floats
    request_s: Floats


class ModelColumns:
    """One model's columns. Arrays have room for more rows than there are devices."""

    def __init__(self, size: int) -> None:
        #: `ModelState`; 0: the device does not have it.
        self.state: npt.NDArray[np.int8] = np.zeros(size, np.int8)
        self.kv_total_bytes: Floats = np.zeros(size)
        self.kv_free_bytes: Floats = np.zeros(size)
        self.prefill_token_s: Floats = np.full(size, np.inf)
        self.request_s: Floats = np.zeros(size)

    def grow(self) -> None:
        """Twice the room."""
        fresh = ModelColumns(len(self.state))
        for name, old in vars(self).items():
            setattr(self, name, np.concatenate([old, getattr(fresh, name)]))

    def take(self, row: int, load: ModelLoad | None) -> None:
        """How the model is on a device now; None: it does not have it."""
        load = load or ModelLoad(ModelState.UNKNOWN)
        self.state[row] = load.state
        self.kv_total_bytes[row] = load.kv_bytes_limit
        self.kv_free_bytes[row] = max(load.kv_bytes_limit - load.kv_bytes_used, 0)
        self.prefill_token_s[row] = load.prefill_token_s or np.inf
        self.request_s[row] = load.request_s

    def view(self, count: int) -> ModelView:
        """Of so many devices; never written to."""
        serves: Flags = self.state[:count] == ModelState.ACTIVE
        arrays = (self.kv_total_bytes, self.kv_free_bytes, self.prefill_token_s, self.request_s)
        return ModelView(serves, *(array[:count].copy() for array in arrays))
