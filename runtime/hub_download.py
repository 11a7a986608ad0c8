"""Downloads one file into the hub's cache; an interrupted download resumes.

The hub's library restarts an interrupted file, and a shard has gigabytes. Here bytes go to `blobs/ETAG.incomplete`, the
next attempt requests the rest, and the complete file is checked against the hub's digest and renamed to `blobs/ETAG`,
where the library finds it. One process at a time writes a file; others wait.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import httpx2
from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

from contracts.errors import ConfigError

#: Consecutive attempts without progress until the download fails, and seconds between them.
_ATTEMPTS, _PAUSE_S = 4, 1.0
_TIMEOUT_S = 15.0
_READ_BYTES = 4 << 20


class Stopped(Exception):
    """The download was stopped, by Ctrl-C or because another one failed. Received bytes are kept."""


@dataclass(frozen=True, slots=True)
class Blob:
    """A file of the hub. path: its place in the cache. etag: a SHA-256, or git's SHA-1 for small files."""

    name: str
    url: str
    etag: str
    size: int
    path: Path

    @property
    def partial(self) -> Path:
        """The path of the incomplete file."""
        return self.path.with_name(f"{self.path.name}.incomplete")

    @property
    def missing_bytes(self) -> int:
        """Bytes not downloaded yet."""
        if self.path.exists():
            return 0
        try:
            return max(self.size - self.partial.stat().st_size, 0)
        except OSError:
            return self.size


def download(blob: Blob, came: Callable[[int], None], stopped: Callable[[], bool]) -> None:
    """Downloads `blob` to its path. came: called with the number of bytes received (negative: to be received again).

    Raises Stopped, httpx2.HTTPError, HfHubHTTPError and OSError, and keeps received bytes; raises ConfigError when the
    digest is wrong, and keeps nothing.
    """
    blob.path.parent.mkdir(parents=True, exist_ok=True)
    while not blob.path.exists():
        with blob.partial.open("ab") as file:
            while not _locked(file):
                if stopped():
                    raise Stopped
                time.sleep(0.1)
            if os.fstat(file.fileno()).st_nlink == 0 or blob.path.exists():
                continue  # another process finished or removed it
            _fill(blob, file, came, stopped)
            if not _is_whole(blob):
                blob.partial.unlink()
                raise ConfigError(
                    f"{blob.url}: what came is not what the hub names ({blob.etag}); start again to download it anew"
                )
            file.flush()
            os.fsync(file.fileno())
            blob.partial.replace(blob.path)


def _fill(blob: Blob, file: IO[bytes], came: Callable[[int], None], stopped: Callable[[], bool]) -> None:
    in_vain = 0
    while (have := os.fstat(file.fileno()).st_size) != blob.size:
        if have > blob.size:
            file.truncate(0)
            continue
        try:
            _ask(blob, file, have, came, stopped)
        except httpx2.TransportError:
            in_vain = 0 if _size(file) > have else in_vain + 1
            if in_vain == _ATTEMPTS:
                raise
            if stopped():
                raise Stopped from None
            time.sleep(_PAUSE_S)
        else:
            in_vain = 0 if _size(file) > have else in_vain + 1
            if in_vain == _ATTEMPTS:
                raise ConfigError(f"{blob.url}: the hub sends {_size(file)} bytes of {blob.size}; try again later")


def _ask(blob: Blob, file: IO[bytes], have: int, came: Callable[[int], None], stopped: Callable[[], bool]) -> None:
    """Appends the hub's bytes from offset `have` on."""
    headers = build_hf_headers() | {"accept-encoding": "identity"} | ({"range": f"bytes={have}-"} if have else {})
    with get_session().stream("GET", blob.url, headers=headers, timeout=_TIMEOUT_S, follow_redirects=True) as answer:
        hf_raise_for_status(answer)
        if have and answer.status_code != 206:  # no support for ranges: start over
            file.truncate(0)
            came(-have)
        for chunk in answer.iter_bytes():
            if stopped():
                raise Stopped
            file.write(chunk)
            came(len(chunk))
        file.flush()


def _size(file: IO[bytes]) -> int:
    file.flush()
    return os.fstat(file.fileno()).st_size


def _is_whole(blob: Blob) -> bool:
    if len(blob.etag) == 64:
        digest = hashlib.sha256()
    elif len(blob.etag) == 40:
        digest = hashlib.sha1(b"blob %d\0" % blob.size, usedforsecurity=False)
    else:  # a mirror whose etags are no digests
        return True
    with blob.partial.open("rb") as file:
        while chunk := file.read(_READ_BYTES):
            digest.update(chunk)
    return digest.hexdigest() == blob.etag


def _locked(file: IO[bytes]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
