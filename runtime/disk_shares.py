"""How much of a disk the slow tiers may take; used by the store and by commands that report it beforehand.

In bytes, `free`: what an unprivileged process may still write; `held`: what the tier already has there; `total`: the
disk's size.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from runtime.config import Config
from runtime.sections import GIB

#: Shares of the disk: for all SSD tiers on this machine together, and for a blob tier in a directory. With equal codecs
#: a blob object is a hard link to an SSD file, so both count the same bytes; else (_BESIDE) they share the disk.
_SSD_SHARE, _BLOB_SHARE, _BLOB_SHARE_BESIDE = 0.4, 0.8, 0.5


class Disk(NamedTuple):
    """Bytes of a directory's file system."""

    free: int
    total: int


def disk_of(path: Path) -> Disk:
    """The disk of the directory, or of its nearest existing parent. Raises OSError."""
    place = next((p for p in (path, *path.parents) if p.exists()), path)
    stat = os.statvfs(place)
    return Disk(stat.f_bavail * stat.f_frsize, stat.f_blocks * stat.f_frsize)


def local_directory(url: str, default: Path) -> Path | None:
    """The directory of a blob tier at `url` (`kv.blob_url`); None: it is a bucket."""
    if not url:
        return default
    return Path(url.removeprefix("file://")) if url.startswith("file://") else None


def blob_directory(config: Config) -> Path | None:
    """`local_directory` of a configuration."""
    return local_directory(config.kv.blob_url, config.data / "blob")


def reserve_bytes(config: Config, disk: Disk) -> int:
    """`kv.disk_reserve` in bytes: tiers do not write to a disk with less free space."""
    return int(config.kv.disk_reserve * disk.total)


def ssd_limit_bytes(config: Config, disk: Disk, held: int) -> int:
    """Size limit of one node's SSD tier: `kv.ssd_gib`, or its share of the disk."""
    if config.kv.ssd_gib:
        return int(config.kv.ssd_gib * GIB)
    return int(_SSD_SHARE * _room(config, disk, held) / config.nodes.on_each_host)


def blob_limit_bytes(config: Config, disk: Disk | None, held: int, ssd: Path) -> int | None:
    """Size limit of the blob tier of all nodes: `kv.blob_gib`, or its share of the disk. None, no limit: it is a bucket
    (`disk` is None)."""
    if config.kv.blob_gib:
        return int(config.kv.blob_gib * GIB)
    if disk is None:
        return None
    beside = config.kv.ssd_codec != config.kv.blob_codec and disk_of(ssd).total == disk.total
    return int((_BLOB_SHARE_BESIDE if beside else _BLOB_SHARE) * _room(config, disk, held))


def _room(config: Config, disk: Disk, held: int) -> int:
    return max(0, disk.free + held - reserve_bytes(config, disk))
