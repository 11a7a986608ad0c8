"""Whether a disk has room to be written: `kv.disk_reserve` of it stays free for other users, manifests and erasures,
which are small and always written."""

from __future__ import annotations

from pathlib import Path

from runtime.config import Config
from runtime.disk_shares import disk_of, reserve_bytes

#: A disk that was too full is written again when this many times the reserve is free.
_AGAIN = 1.25


class Space:
    """The disk of the directory `path`; None: not a disk, never lacks room. Thread-safe."""

    def __init__(self, path: Path | None, config: Config) -> None:
        self._path, self._config = path, config
        self._low = False

    def lacks(self, size_bytes: int) -> bool:
        """Whether writing this many bytes would leave less than the reserve. False without a reserve, or when the disk
        cannot be queried."""
        if self._path is None:
            return False
        try:
            disk = disk_of(self._path)
        except OSError:
            return False
        reserve = reserve_bytes(self._config, disk)
        self._low = reserve > 0 and disk.free - size_bytes < reserve * (_AGAIN if self._low else 1)
        return self._low

    def free_bytes(self) -> float:
        """Free bytes; -1 where unknown."""
        try:
            return float(disk_of(self._path).free) if self._path is not None else -1.0
        except OSError:
            return -1.0
