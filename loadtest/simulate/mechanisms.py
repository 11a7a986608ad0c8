"""A node's mechanisms for KV: its tiers, and those of SYMPHONY, section 3.4, each with a switch.

For ablations (figure 17 of the paper), and for other systems, which have some of them.
"""

from __future__ import annotations

from dataclasses import dataclass

HBM, DRAM, SSD, PEER, BLOB = "hbm", "dram", "ssd", "peer", "blob"
EVERYWHERE = frozenset((HBM, DRAM, SSD, PEER, BLOB))


@dataclass(frozen=True, slots=True)
class Mechanisms:
    """tiers: keep KV after a turn, and serve it to the next (`peer`: other nodes). The switches are the worker's:

    cooperative: running requests may evict what a hint brought into HBM; off: it stays until used or the hint ends
    (`kv.hold_hinted`). layer_priority: high layers are evicted first, across sessions; off: whole sessions
    (`kv.layer_priority`). layerwise: layers load while lower ones compute; off: a request waits for all
    (`kv.layerwise`). codec: compression factor over the network and from the blob tier. decode_bytes_per_s: speed at
    which the device decodes the codec, doing nothing else; 0: free.
    """

    tiers: frozenset[str] = EVERYWHERE
    cooperative: bool = True
    layer_priority: bool = False
    layerwise: bool = True
    codec: float = 1.0
    decode_bytes_per_s: float = 0.0

    @property
    def keeps(self) -> bool:
        """Whether KV is kept at all."""
        return bool(self.tiers)


ALL = Mechanisms()
NONE = Mechanisms(frozenset())
IN_MEMORY = Mechanisms(frozenset((HBM, DRAM)))
