"""The packed bytes of a model's weights in host memory, from which they are copied to the device (Prism, section 5.3).

One file in `shm_dir` for each model, type and layout; the workers of a machine share it. It is written under another
name, with a digest behind the bytes, and then renamed; whoever opens it checks the digest. A worker holds a shared lock
on the file while it uses it. The last one removes it.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from blake3 import blake3

from runtime import telemetry
from runtime.places import IMAGE_PREFIX
from worker.models.weights import WeightSpan

log = telemetry.logger("worker.models.image")
_SUFFIX = ".image"
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
        _remove_if_unused(self.path, self._fd)
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
    path = directory / f"{IMAGE_PREFIX}{blake3(key + repr(sizes).encode()).hexdigest()[:32]}{_SUFFIX}"
    try:
        with _only(path):
            return _opened(path, sizes, lock) or _made(path, spans, sizes, lock)
    except OSError as error:
        log.warning("no image of the weights in host memory", path=str(path), error=str(error))
        return None


def remove_unused(directory: Path) -> None:
    """Remove images that nobody uses: of workers that were killed."""
    for path in directory.glob(f"{IMAGE_PREFIX}*"):
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue
        _remove_if_unused(path, fd)
        os.close(fd)


def _opened(path: Path, sizes: Sequence[int], lock: Lock) -> HostImage | None:
    """The existing image, if its digest is right."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    fcntl.flock(fd, fcntl.LOCK_SH)
    length = sum(sizes)
    if os.fstat(fd).st_size == length + _DIGEST and os.pread(fd, _DIGEST, length) == _digest(fd, length):
        return HostImage(path, fd, sizes, lock)
    log.warning("the image of the weights is damaged; making it again", path=str(path))
    os.close(fd)
    path.unlink(missing_ok=True)
    return None


def _made(path: Path, spans: Sequence[WeightSpan], sizes: Sequence[int], lock: Lock) -> HostImage:
    temporary = path.with_suffix(f".{os.getpid()}")
    fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
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
        fcntl.flock(fd, fcntl.LOCK_SH)
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


def _remove_if_unused(path: Path, fd: int) -> None:
    """Unlink the open file, which had this path, unless somebody else has it open or the path is another file's."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(fd).st_ino == path.stat().st_ino:
            path.unlink()
    except OSError:
        return


class _only:
    """One process at a time looks for or makes this image. The lock is on a file beside it, which stays empty."""

    def __init__(self, path: Path) -> None:
        self._path = path.with_suffix(".lock")

    def __enter__(self) -> None:
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._fd, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)
