"""A node's arena as a file: what pages its file system offers, and how it is mapped, the same way by the store and by its workers.

Huge pages come in two ways. A hugetlbfs mount named in `shm_dir` has nothing else. A tmpfs gives transparent ones when it is mounted
with `huge=` and the mapping asks for them; each process that maps the file has to ask, as whoever touches a page first makes it.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from pathlib import Path
from typing import Literal, NamedTuple

from contracts.errors import ConfigError

HugePages = Literal["auto", "on", "off"]
_MOUNTS = Path("/proc/self/mountinfo")
_THP = Path("/sys/kernel/mm/transparent_hugepage")
_HUGETLB = Path("/sys/kernel/mm/hugepages")
_ON_REQUEST = ("advise", "within_size", "always")


class Pages(NamedTuple):
    """kind: "hugetlbfs", "transparent" or "small". bytes: size of one page."""

    kind: str
    bytes: int


def offered(directory: Path) -> Pages:
    """The best pages that files in `directory` can have. `directory` must exist."""
    file_system, options = _mount_of(directory)
    if file_system == "hugetlbfs":
        return Pages("hugetlbfs", os.statvfs(directory).f_bsize)
    policy = _chosen(_THP / "shmem_enabled")
    asked = next((o.removeprefix("huge=") for o in options if o.startswith("huge=")), "never")
    if file_system == "tmpfs" and policy != "deny" and (policy == "force" or asked in _ON_REQUEST):
        return Pages("transparent", _number(_THP / "hpage_pmd_size", 2 << 20))
    return Pages("small", mmap.PAGESIZE)


def choose(directory: Path, wanted: HugePages) -> Pages:
    """The pages that the arena will have. Raises ConfigError when `kv.hugepages` cannot be had."""
    found = offered(directory)
    if wanted == "on" and found.kind == "small":
        raise ConfigError(
            f"kv.hugepages = 'on': {directory} offers none; name a hugetlbfs in shm_dir, or mount -o remount,huge=advise {directory}, "
            "or set kv.hugepages: auto"
        )
    if wanted == "off" and found.kind == "hugetlbfs":
        raise ConfigError(
            f"kv.hugepages = 'off': {directory} is a hugetlbfs and has no other pages; name a tmpfs such as /dev/shm in shm_dir, "
            "or set kv.hugepages: auto"
        )
    return Pages("small", mmap.PAGESIZE) if wanted == "off" else found


def rounded(size_bytes: int, directory: Path) -> int:
    """`size_bytes`, up to whole pages of a hugetlbfs; elsewhere as it is."""
    pages = offered(directory)
    return -(-size_bytes // pages.bytes) * pages.bytes if pages.kind == "hugetlbfs" else size_bytes


def free_bytes(directory: Path) -> int:
    """What files in `directory` can still take. Raises OSError when it is not there."""
    stat = os.statvfs(directory)
    if stat.f_blocks or _mount_of(directory)[0] != "hugetlbfs":
        return stat.f_bavail * stat.f_frsize
    # A hugetlbfs without size= says nothing: it takes from the machine's pool.
    return _number(_HUGETLB / f"hugepages-{stat.f_bsize >> 10}kB" / "free_hugepages", 0) * stat.f_bsize


def map_file(fd: int, size_bytes: int, wanted: HugePages) -> mmap.mmap:
    """The first `size_bytes` of the file, shared and writable. Raises OSError when it is shorter or the pages are not there."""
    if os.fstat(fd).st_size < size_bytes:
        raise OSError(errno.EINVAL, f"the arena's file is shorter than {size_bytes} bytes")
    mapped = mmap.mmap(fd, size_bytes, mmap.MAP_SHARED)
    # A kernel without transparent pages, and a hugetlbfs, refuse the advice; there is nothing to be had then.
    with contextlib.suppress(OSError):
        mapped.madvise(mmap.MADV_NOHUGEPAGE if wanted == "off" else mmap.MADV_HUGEPAGE)
    return mapped


def _mount_of(directory: Path) -> tuple[str, list[str]]:
    """(file system, its own options) of the mount that `directory` lies on; ("", []) where the kernel does not say."""
    device = os.stat(directory).st_dev
    name = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = _MOUNTS.read_text().splitlines()
    except OSError:
        return "", []
    for line in lines:
        before, _, after = line.partition(" - ")
        if before.split()[2] == name:
            kind, _, options = after.split(" ", 2)
            return kind, options.split(",")
    return "", []


def _chosen(file: Path) -> str:
    """The word in brackets."""
    try:
        return file.read_text().partition("[")[2].partition("]")[0]
    except OSError:
        return ""


def _number(file: Path, otherwise: int) -> int:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return otherwise
