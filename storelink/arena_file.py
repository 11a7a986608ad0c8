"""A node's arena as a file: the page sizes its file system offers, and how store and workers map it.

Huge pages come from a hugetlbfs mount (`shm_dir`), which has no other pages, or from a tmpfs mounted with `huge=`,
where the mapping must ask for them. Every process that maps the file asks, because the first touch allocates a page.
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
    """The largest pages that files in `directory` can have. `directory` must exist."""
    file_system, options = _mount_of(directory)
    if file_system == "hugetlbfs":
        return Pages("hugetlbfs", os.statvfs(directory).f_bsize)
    policy = _chosen(_THP / "shmem_enabled")
    asked = next((o.removeprefix("huge=") for o in options if o.startswith("huge=")), "never")
    if file_system == "tmpfs" and policy != "deny" and (policy == "force" or asked in _ON_REQUEST):
        return Pages("transparent", _number(_THP / "hpage_pmd_size", 2 << 20))
    return Pages("small", mmap.PAGESIZE)


def choose(directory: Path, wanted: HugePages) -> Pages:
    """The pages that the arena will have. Raises ConfigError when `directory` cannot provide what `wanted` asks for."""
    found = offered(directory)
    if wanted == "on" and found.kind == "small":
        raise ConfigError(
            f"kv.hugepages = 'on': {directory} offers none; name a hugetlbfs in shm_dir, or mount -o "
            f"remount,huge=advise {directory}, "
            "or set kv.hugepages: auto"
        )
    if wanted == "off" and found.kind == "hugetlbfs":
        raise ConfigError(
            f"kv.hugepages = 'off': {directory} is a hugetlbfs and has no other pages; name a tmpfs such as "
            "/dev/shm in shm_dir, "
            "or set kv.hugepages: auto"
        )
    return Pages("small", mmap.PAGESIZE) if wanted == "off" else found


def rounded(size_bytes: int, directory: Path) -> int:
    """`size_bytes`, rounded up to whole pages on a hugetlbfs; elsewhere unchanged."""
    pages = offered(directory)
    return -(-size_bytes // pages.bytes) * pages.bytes if pages.kind == "hugetlbfs" else size_bytes


def free_bytes(directory: Path) -> int:
    """Free space for files in `directory`. Raises OSError when it does not exist."""
    stat = os.statvfs(directory)
    if stat.f_blocks or _mount_of(directory)[0] != "hugetlbfs":
        return stat.f_bavail * stat.f_frsize
    # A hugetlbfs without size= reports no blocks: it allocates from the machine's pool.
    return _number(_HUGETLB / f"hugepages-{stat.f_bsize >> 10}kB" / "free_hugepages", 0) * stat.f_bsize


def map_file(fd: int, size_bytes: int, wanted: HugePages) -> mmap.mmap:
    """Maps the first `size_bytes` of the file, shared and writable. Raises OSError when the file is shorter or pages
    are missing."""
    if os.fstat(fd).st_size < size_bytes:
        raise OSError(errno.EINVAL, f"the arena's file is shorter than {size_bytes} bytes")
    mapped = mmap.mmap(fd, size_bytes, mmap.MAP_SHARED)
    # Kernels without transparent pages, and hugetlbfs, refuse the advice; then it changes nothing.
    with contextlib.suppress(OSError):
        mapped.madvise(mmap.MADV_NOHUGEPAGE if wanted == "off" else mmap.MADV_HUGEPAGE)
    return mapped


def _mount_of(directory: Path) -> tuple[str, list[str]]:
    """(file system, mount options) of the mount that holds `directory`; ("", []) where the kernel does not say."""
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
    """The bracketed word of a sysfs setting; "" when the file cannot be read."""
    try:
        return file.read_text().partition("[")[2].partition("]")[0]
    except OSError:
        return ""


def _number(file: Path, otherwise: int) -> int:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return otherwise
