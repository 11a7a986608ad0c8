"""Excludes a service's permanent objects from Python's garbage collection."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

#: Threshold of the first generation: one request allocates more objects than the default of 700.
_FIRST_THRESHOLD = 20_000


def keep_what_is_here() -> None:
    """Excludes all current objects from collection: traversing a worker's modules and tables stops all threads for
    0.1 s."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_FIRST_THRESHOLD, 10, 10)


@contextlib.contextmanager
def collecting_nothing() -> Iterator[None]:
    """Allocates many permanent objects: they are not traversed meanwhile, and no more afterwards."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        keep_what_is_here()
