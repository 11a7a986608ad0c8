"""How much of a disk the slow tiers may take: one place for the store that takes it and for the commands that say so beforehand.

`free` is what a process without privileges may still write, `held` what the tier has there already, `total` the disk's size; all in bytes.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from runtime.config import GIB, Config

#: Of what the disk has: for the SSD tiers of the nodes on this machine together, and for a blob tier that is a directory. Where a blob
#: object is an SSD's file by another name both take the same bytes; else they share the disk.
_SSD_SHARE, _BLOB_SHARE, _BLOB_SHARE_BESIDE = 0.4, 0.8, 0.5


class Disk(NamedTuple):
    """What the file system of a directory has, in bytes."""

    free: int
    total: int


def disk_of(path: Path) -> Disk:
    """Of the directory, or of the nearest one above it that is there. Raises OSError."""
    place = next((p for p in (path, *path.parents) if p.exists()), path)
    stat = os.statvfs(place)
    return Disk(stat.f_bavail * stat.f_frsize, stat.f_blocks * stat.f_frsize)


def local_directory(url: str, default: Path) -> Path | None:
    """Where a blob tier at `url` (`kv.blob_url`) lies when it is a directory; None: it is a bucket."""
    if not url:
        return default
    return Path(url.removeprefix("file://")) if url.startswith("file://") else None


def blob_directory(config: Config) -> Path | None:
    """`local_directory` of a configuration."""
    return local_directory(config.kv.blob_url, config.data / "blob")


def reserve_bytes(config: Config, disk: Disk) -> int:
    """`kv.disk_reserve` of the disk: while less than this is free nothing is written to a tier on it."""
    return int(config.kv.disk_reserve * disk.total)


def ssd_limit_bytes(config: Config, disk: Disk, held: int) -> int:
    """Of one node's SSD tier: `kv.ssd_gib`, or its part of the disk."""
    if config.kv.ssd_gib:
        return int(config.kv.ssd_gib * GIB)
    nodes_here = 1 if "{n}" in config.nodes.store_host else config.nodes.count
    return int(_SSD_SHARE * _room(config, disk, held) / nodes_here)


def blob_limit_bytes(config: Config, disk: Disk | None, held: int, ssd: Path) -> int | None:
    """Of the blob tier, of all nodes together: `kv.blob_gib`, or its part of the disk. None, no limit: it is a bucket (`disk` is None),
    which does not say what it has."""
    if config.kv.blob_gib:
        return int(config.kv.blob_gib * GIB)
    if disk is None:
        return None
    beside = config.kv.ssd_codec != config.kv.blob_codec and disk_of(ssd).total == disk.total
    return int((_BLOB_SHARE_BESIDE if beside else _BLOB_SHARE) * _room(config, disk, held))


def _room(config: Config, disk: Disk, held: int) -> int:
    return max(0, disk.free + held - reserve_bytes(config, disk))
