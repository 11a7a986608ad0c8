"""Bands of neighbouring layers. Slabs hold pieces of one band, and loads ask for a band at a time.

Eviction takes the highest layers first, so slabs of one band become empty as a whole. Models with fewer layers than
bands have one band per layer.
"""

from __future__ import annotations

#: Default number of bands.
BANDS = 4


def band_of(layer: int, layers: int, bands: int = BANDS) -> int:
    """The band of a layer; band 0 has the lowest layers."""
    return layer * min(bands, layers) // layers


def layers_of(band: int, layers: int, bands: int = BANDS) -> range:
    """The layers of a band."""
    count = min(bands, layers)
    return range(-(-band * layers // count), -(-(band + 1) * layers // count))
