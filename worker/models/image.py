"""The packed bytes of a model's weights in host memory, from which they are copied to the device (Prism, section 5.3).

One file in `shm_dir` for each model, type and layout; the workers of a machine share it. It is written under another
name, with a digest behind the bytes, and then renamed; whoever opens it checks the digest. A worker holds a shared lock
on the file while it uses it. The last one removes it (`runtime.weight_images`).
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from blake3 import blake3

from runtime import telemetry, weight_images
from worker.models.weights import WeightSpan

log = telemetry.logger("worker.models.image")
_DIGEST = 32


#: lock(address, bytes): page-locks host memory that is only read, and returns what undoes it.
Lock = Callable[[int, int], Callable[[], object]]


def no_lock(address: int, bytes_: int) -> Callable[[], object]:
    """A `Lock` for devices whose copies do not need it."""
    return lambda: None


class HostImage:
    """See the module. addresses: of each span's bytes, in the order of the spans that made it."""

    def __init__(self, path: Path, fd: int, sizes: Sequence[int], lock: Lock) -> None:
        self.path, self._fd = path, fd
        self._mapped = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
        self._bytes = np.frombuffer(self._mapped, np.uint8)
        self.bytes = len(self._bytes)
        base = int(self._bytes.ctypes.data)
        self.addresses = [base + at for at in _offsets(sizes)[:-1]]
        self._unlock = lock(base, self.bytes)

    def close(self) -> None:
        """Stop using it; the file goes when nobody else uses it."""
        self._unlock()
        del self._bytes
        self._mapped.close()
        weight_images.remove_if_unused(self.path, self._fd)
        os.close(self._fd)


def image_of(
    directory: Path, key: bytes, spans: Sequence[WeightSpan], room: int, lock: Lock = no_lock
) -> HostImage | None:
    """The image of these spans, opened, or made if there is none. Takes as long as reading and packing the checkpoint.

    key: identifies model, type and layout. room: bytes that may be used. None: it does not fit, or cannot be written.
    """
    sizes = [span.packed_bytes for span in spans]
    if sum(sizes) + _DIGEST > room:
        return None
    name = blake3(key + repr(sizes).encode()).hexdigest()[:32]
    path = directory / f"{weight_images.PREFIX}{name}{weight_images.SUFFIX}"
    try:
        with weight_images.only(path):
            return _opened(path, sizes, lock) or _made(path, spans, sizes, lock)
    except OSError as error:
        log.warning("no image of the weights in host memory", path=str(path), error=str(error))
        return None


def _opened(path: Path, sizes: Sequence[int], lock: Lock) -> HostImage | None:
    """The existing image, if its digest is right."""
    try:
        fd = weight_images.opened(path)
    except FileNotFoundError:
        return None
    length = sum(sizes)
    if os.fstat(fd).st_size == length + _DIGEST and os.pread(fd, _DIGEST, length) == _digest(fd, length):
        return HostImage(path, fd, sizes, lock)
    log.warning("the image of the weights is damaged; making it again", path=str(path))
    os.close(fd)
    path.unlink(missing_ok=True)
    return None


def _made(path: Path, spans: Sequence[WeightSpan], sizes: Sequence[int], lock: Lock) -> HostImage:
    temporary = path.with_suffix(f".{os.getpid()}")
    fd = weight_images.opened(temporary, make=True)
    try:
        length = sum(sizes)
        os.posix_fallocate(fd, 0, length + _DIGEST)  # fails now, rather than by a signal when a page is touched
        with mmap.mmap(fd, length + _DIGEST) as mapped:
            view = np.frombuffer(mapped, np.uint8)
            base = int(view.ctypes.data)
            for span, at in zip(spans, _offsets(sizes), strict=False):
                span.pack_at(base + at)
            view[length:] = np.frombuffer(_digest(fd, length), np.uint8)
            del view
        temporary.replace(path)
        return HostImage(path, fd, sizes, lock)
    except BaseException:
        temporary.unlink(missing_ok=True)
        os.close(fd)
        raise


def _digest(fd: int, length: int) -> bytes:
    with mmap.mmap(fd, length, prot=mmap.PROT_READ) as mapped:
        return blake3(mapped, max_threads=blake3.AUTO).digest()


def _offsets(sizes: Sequence[int]) -> list[int]:
    found = [0]
    for size in sizes:
        found.append(found[-1] + size)
    return found
