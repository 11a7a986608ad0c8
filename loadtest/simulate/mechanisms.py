"""What a node can do with KV: tiers that keep it, and the mechanisms of SYMPHONY, section 3.4, each of which can be switched off.

Used for ablations (figure 17 of the paper) and for other systems, which have some of these and not the others.
"""

from __future__ import annotations

from dataclasses import dataclass

HBM, DRAM, SSD, PEER, BLOB = "hbm", "dram", "ssd", "peer", "blob"
EVERYWHERE = frozenset((HBM, DRAM, SSD, PEER, BLOB))


@dataclass(frozen=True, slots=True)
class Mechanisms:
    """tiers: that keep KV after a turn, and that it is brought from (`peer`: other nodes). The switches are those of the worker:

    cooperative: what a hint brought into HBM gives way to running requests; off, it stays until it is used or its hint ends
    (`kv.cooperative`). layer_priority: high layers leave first, across sessions; off, whole sessions leave (`kv.layer_priority`).
    layerwise: layers load while lower ones compute; off, all is waited for (`kv.layerwise`).
    codec: bytes over the network and from the blob tier are as many times fewer. decode_bytes_per_s: of KV, at which a device that decodes
    does nothing else; 0: it costs the device nothing.
    """

    tiers: frozenset[str] = EVERYWHERE
    cooperative: bool = True
    layer_priority: bool = True
    layerwise: bool = True
    codec: float = 1.0
    decode_bytes_per_s: float = 0.0

    @property
    def keeps(self) -> bool:
        """Anything at all."""
        return bool(self.tiers)


ALL = Mechanisms()
NONE = Mechanisms(frozenset())
