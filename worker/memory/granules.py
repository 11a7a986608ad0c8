"""The physical pool of the host "device": which granule is free, and which address range shows it.

The same semantics as CUDA's virtual memory management (reserve a range, create physical memory, map, unmap), with one
memfd as the physical memory: an address range is reserved with PROT_NONE, and granules of the memfd are mapped into it.
A granule keeps its content while it moves between spans; what is given back loses its content, and the memory returns to
the system at once. Prior art: kvcached and vAttention do this over CUDA VMM; a plain allocator could not lend a weight's
memory to the KV cache without copying everything around it.

Not decided here: who gets a granule. Not safe for concurrent use: the worker's one ledger calls it from one thread.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import itertools
import mmap
import os
from collections.abc import Iterator, Sequence

from contracts.errors import UpbeatError

_PROT_NONE = 0
_MAP_FIXED, _MAP_NORESERVE, _MAP_POPULATE = 0x10, 0x4000, 0x8000
_MAP_FAILED = ctypes.c_void_p(-1).value
_FALLOC_PUNCH = 0x03  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
_F_ADD_SEALS, _F_SEAL_SHRINK, _F_SEAL_GROW = 1033, 0x02, 0x04

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]

_FREE, _HELD = -2, -1  # states of a granule that no span shows; otherwise the span's number


class OutOfGranules(UpbeatError, MemoryError):
    """The pool has fewer free granules than were asked for; nothing was taken."""


class GranuleMisuse(UpbeatError, ValueError):
    """A granule is mapped twice, given back while mapped, or a range is outside its span. Nothing was changed."""


class HostPool:
    """`total` granules of `granule_bytes` each, in one memfd.

    Every granule is in exactly one state: free (in the pool), held (taken, shown nowhere) or mapped (taken, shown by
    exactly one span). Physical memory is used by granules that were mapped since they were taken, and by no others.
    """

    def __init__(self, total_bytes: int, granule_bytes: int) -> None:
        """Raises ValueError when a size is not positive, or not a multiple (the granule of the system's page)."""
        if granule_bytes <= 0 or granule_bytes % mmap.PAGESIZE:
            raise ValueError(f"granule_bytes {granule_bytes} must be a positive multiple of {mmap.PAGESIZE}")
        if total_bytes <= 0 or total_bytes % granule_bytes:
            raise ValueError(f"total_bytes {total_bytes} must be a positive multiple of the granule, {granule_bytes}")
        self.granule_bytes = granule_bytes
        self.total = total_bytes // granule_bytes
        self.fd = os.memfd_create("upbeat-hbm", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, total_bytes)
        _seal(self.fd)
        self._free = list(range(self.total))  # a heap: lowest numbers first, so that runs stay contiguous
        self._state = [_FREE] * self.total
        self._spans: dict[int, Span] = {}
        self._numbers = itertools.count()

    @property
    def free(self) -> int:
        """Granules that can be taken."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Takes `count` granules, content all zero. Raises OutOfGranules when fewer are free; then nothing changes."""
        if count > len(self._free):
            raise OutOfGranules(f"{count} granules of {self.granule_bytes} bytes wanted, {len(self._free)} of {self.total} free")
        taken = [heapq.heappop(self._free) for _ in range(count)]
        for granule in taken:
            self._state[granule] = _HELD
        return taken

    def give(self, granules: Sequence[int]) -> None:
        """Returns held granules and releases their memory. Raises GranuleMisuse, changing nothing, unless all are held."""
        self._require_held(granules)
        for start, count in _runs(granules):
            if _libc.fallocate(self.fd, _FALLOC_PUNCH, start * self.granule_bytes, count * self.granule_bytes):
                raise _os_error("fallocate")
        for granule in granules:
            self._state[granule] = _FREE
            heapq.heappush(self._free, granule)

    def reserve(self, bytes_: int) -> Span:
        """An address range of at least `bytes_`, rounded up to whole granules, that shows nothing yet."""
        if bytes_ <= 0:
            raise ValueError(f"cannot reserve {bytes_} bytes")
        count = -(-bytes_ // self.granule_bytes)
        span = Span(self, next(self._numbers), count)
        self._spans[span.number] = span
        return span

    def resident_bytes(self) -> int:
        """Physical memory that the pool uses now, as the system counts it."""
        return os.fstat(self.fd).st_blocks * 512

    def close(self) -> None:
        """Closes all spans and the pool. Tensors over any of it must not be touched any more."""
        for span in list(self._spans.values()):
            span.close()
        os.close(self.fd)

    def validate(self) -> None:
        """Raises AssertionError unless every granule is in exactly one place."""
        shown = [(granule, span.number) for span in self._spans.values() for _, granule in span.mapped()]
        assert len({granule for granule, _ in shown}) == len(shown), "a granule is mapped twice"
        for granule, number in shown:
            assert self._state[granule] == number, f"granule {granule} is in span {number}, its state says {self._state[granule]}"
        assert sum(1 for s in self._state if s >= 0) == len(shown), "a granule counts as mapped and is not"
        assert sorted(self._free) == [g for g, s in enumerate(self._state) if s == _FREE], "the free list and the states differ"

    def _require_held(self, granules: Sequence[int]) -> None:
        if len(set(granules)) != len(granules):
            raise GranuleMisuse("a granule is named twice")
        for granule in granules:
            if not 0 <= granule < self.total or self._state[granule] != _HELD:
                raise GranuleMisuse(f"granule {granule} is not held: it is free, mapped or unknown")


class Span:
    """A reserved address range, in granules; made by `HostPool.reserve`.

    `address` is stable until `close`. Reading or writing where no granule is mapped kills the process, as it does on a
    device: the ledger, not this class, keeps that from happening.
    """

    def __init__(self, pool: HostPool, number: int, count: int) -> None:
        self.pool = pool
        self.number = number
        self.granules = count
        self.bytes = count * pool.granule_bytes
        address = _mmap(None, self.bytes, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, -1, 0)
        self.address: int = address
        self._at: dict[int, int] = {}

    def map(self, at_granule: int, granules: Sequence[int]) -> None:
        """Shows held `granules` from granule `at_granule` of this span on. Their memory is allocated now, not on first touch.

        Raises GranuleMisuse, changing nothing, when one is not held or the place is taken or outside.
        """
        self._require_inside(at_granule, len(granules))
        self.pool._require_held(granules)
        if any(at in self._at for at in range(at_granule, at_granule + len(granules))):
            raise GranuleMisuse(f"span {self.number} shows something in {at_granule}..{at_granule + len(granules)} already")
        size, at = self.pool.granule_bytes, at_granule
        flags = mmap.MAP_SHARED | _MAP_FIXED | _MAP_POPULATE
        for first, count in _runs(granules):
            _mmap(self.address + at * size, count * size, mmap.PROT_READ | mmap.PROT_WRITE, flags, self.pool.fd, first * size)
            for offset in range(count):
                self._at[at + offset] = first + offset
                self.pool._state[first + offset] = self.number
            at += count

    def unmap(self, at_granule: int, count: int) -> list[int]:
        """Hides `count` granules and returns their numbers, held and with their content.

        Raises GranuleMisuse, changing nothing, unless all of the range shows something.
        """
        self._require_inside(at_granule, count)
        if any(at not in self._at for at in range(at_granule, at_granule + count)):
            raise GranuleMisuse(f"span {self.number} shows nothing in part of {at_granule}..{at_granule + count}")
        if count == 0:
            return []
        size = self.pool.granule_bytes
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED
        _mmap(self.address + at_granule * size, count * size, _PROT_NONE, flags, -1, 0)
        hidden = [self._at.pop(at) for at in range(at_granule, at_granule + count)]
        for granule in hidden:
            self.pool._state[granule] = _HELD
        return hidden

    def mapped(self) -> list[tuple[int, int]]:
        """`(place, granule)` of everything shown, by place."""
        return sorted(self._at.items())

    def close(self) -> None:
        """Gives back what is still shown and the address range. Calling it twice is harmless."""
        if self.pool._spans.pop(self.number, None) is None:
            return
        held = list(self._at.values())
        for granule in held:
            self.pool._state[granule] = _HELD
        self._at.clear()
        if _libc.munmap(self.address, self.bytes):
            raise _os_error("munmap")
        self.pool.give(held)

    def _require_inside(self, at_granule: int, count: int) -> None:
        if at_granule < 0 or count < 0 or at_granule + count > self.granules:
            raise GranuleMisuse(f"{at_granule}..{at_granule + count} is outside span {self.number} of {self.granules} granules")


def _runs(granules: Sequence[int]) -> Iterator[tuple[int, int]]:
    """`(first, count)` of the maximal runs of consecutive numbers, in the order given."""
    first = count = 0
    for granule in granules:
        if count and granule == first + count:
            count += 1
            continue
        if count:
            yield first, count
        first, count = granule, 1
    if count:
        yield first, count


def _seal(fd: int) -> None:
    """Makes the memfd's size final, so that a mapping can never lose its file."""
    fcntl.fcntl(fd, _F_ADD_SEALS, _F_SEAL_SHRINK | _F_SEAL_GROW)


def _mmap(address: int | None, bytes_: int, protection: int, flags: int, fd: int, offset: int) -> int:
    got = _libc.mmap(address, bytes_, protection, flags, fd, offset)
    if got is None or got == _MAP_FAILED:
        raise _os_error("mmap")
    return int(got)


def _os_error(call: str) -> OSError:
    code = ctypes.get_errno()
    return OSError(code, f"{call}: {os.strerror(code)}")
