"""Python's garbage collector, told what it need not look at: what a service is made of stays until it ends."""

from __future__ import annotations

import gc

#: A request makes more young objects than the default of 700 allows.
_YOUNG = 20_000


def keep_what_is_here() -> None:
    """From now on, what exists now is left out. A look at a worker's modules and tables stops all its threads for a tenth of a second."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, 10, 10)
