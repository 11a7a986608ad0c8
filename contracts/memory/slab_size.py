"""The size of a slab: small, but pages waste at most 5 % of it."""

from __future__ import annotations

#: At most 1 / _WASTE_PART of a slab may be unused.
_WASTE_PART = 20


def slab_granules(page_bytes: int, granule_bytes: int, most: int | None = None) -> int:
    """The fewest granules that pages fill with at most 5 % waste, at most `most`; 0 when `most` granules hold no
    page."""
    granules = -(-page_bytes // granule_bytes)
    if most is not None and granules > most:
        return 0
    while granules != most and granules * granule_bytes % page_bytes * _WASTE_PART > granules * granule_bytes:
        granules += 1
    return granules
