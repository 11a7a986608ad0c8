"""Size limits of a node's slow tiers, and free space of their disks: runtime/disk_shares.py applied to this node's
directories."""

from __future__ import annotations

import asyncio
from pathlib import Path

from kvstore.tiers.space import Space
from runtime.config import Config
from runtime.disk_shares import blob_directory, blob_limit_bytes, disk_of, ssd_limit_bytes

#: Sessions kept in memory although nothing of them is here (each some kilobytes): where quotas count them, and else.
_SESSIONS_FOR_QUOTAS, _SESSIONS_ELSEWHERE = 100_000, 10_000


def most_sessions(config: Config) -> int:
    """How many sessions of which a node holds nothing its store keeps in memory."""
    quotas = config.kv.default_tenant_quota_gib or config.kv.tenant_quota_gib
    return _SESSIONS_FOR_QUOTAS if quotas else _SESSIONS_ELSEWHERE


class Sizes:
    """blob_directory: None where the blob tier is a bucket."""

    def __init__(self, config: Config, ssd: Path) -> None:
        self._config, self._ssd = config, ssd
        self.blob_directory = blob_directory(config)
        self.ssd_space, self.blob_space = Space(ssd, config), Space(self.blob_directory, config)

    async def ssd_limit_bytes(self, held: int) -> int:
        """Limit of this node's SSD tier, which holds `held` bytes now. Raises OSError."""
        return ssd_limit_bytes(self._config, await asyncio.to_thread(disk_of, self._ssd), held)

    async def blob_limit_bytes(self, held: int) -> int | None:
        """Limit of the blob tier, which holds `held` bytes now; None: no limit. Raises OSError."""
        disk = await asyncio.to_thread(disk_of, self.blob_directory) if self.blob_directory is not None else None
        return blob_limit_bytes(self._config, disk, held, self._ssd)

    def free_bytes(self, tier: str) -> float:
        """Free bytes on the disk of "ssd" or "blob"; -1: not a disk, or unknown."""
        return (self.ssd_space if tier == "ssd" else self.blob_space).free_bytes()
