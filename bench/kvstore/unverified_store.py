"""The store with verification of what the SSD gave taken out, to see what that costs. For measuring only: it serves whatever it read."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.__main__ import main
from kvstore.core.events import Fault
from kvstore.tiers import ssd_reads
from kvstore.tiers.arena import Arena


def _trust(_: Arena, fetches: Sequence[object]) -> list[dict[int, Fault]]:
    return [{} for _ in fetches]


if __name__ == "__main__":
    ssd_reads.verify = _trust  # type: ignore[assignment]
    main()
