"""One file from a hub into the hub's own cache, so that an interrupted download goes on where it ended.

The hub's library begins an interrupted file anew, and a shard has gigabytes. Here its bytes go to `blobs/ETAG.incomplete`, the next attempt
asks for the rest, and the whole is checked against the digest that the hub names before it takes its place as `blobs/ETAG`, where the
library finds it. One process at a time writes a file; others wait for it.
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

#: Attempts in a row that bring no byte before the download is given up, and the seconds between two of them.
_ATTEMPTS, _PAUSE_S = 4, 1.0
_TIMEOUT_S = 15.0
_READ_BYTES = 4 << 20


class Stopped(Exception):
    """Somebody else's failure, or Ctrl-C, ended this download; what has come stays."""


@dataclass(frozen=True, slots=True)
class Blob:
    """A file of the hub. path: where the cache keeps it. etag: a SHA-256, or git's SHA-1 of a small file."""

    name: str
    url: str
    etag: str
    size: int
    path: Path

    @property
    def partial(self) -> Path:
        """Where its bytes go until they are all there."""
        return self.path.with_name(f"{self.path.name}.incomplete")

    @property
    def missing_bytes(self) -> int:
        """How many of its bytes are not on this disk yet."""
        if self.path.exists():
            return 0
        try:
            return max(self.size - self.partial.stat().st_size, 0)
        except OSError:
            return self.size


def download(blob: Blob, came: Callable[[int], None], stopped: Callable[[], bool]) -> None:
    """Bring `blob` to its path. came: told of bytes as they come (negative: some must come again).

    Raises Stopped, httpx2.HTTPError, HfHubHTTPError and OSError, keeping what has come; ConfigError when the bytes are not what the hub
    names, keeping nothing.
    """
    blob.path.parent.mkdir(parents=True, exist_ok=True)
    while not blob.path.exists():
        with blob.partial.open("ab") as file:
            while not _locked(file):
                if stopped():
                    raise Stopped
                time.sleep(0.1)
            if os.fstat(file.fileno()).st_nlink == 0 or blob.path.exists():
                continue  # another process finished it, or threw it away
            _fill(blob, file, came, stopped)
            if not _is_whole(blob):
                blob.partial.unlink()
                raise ConfigError(f"{blob.url}: what came is not what the hub names ({blob.etag}); start again to download it anew")
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
    """Append what the hub sends from byte `have` on."""
    headers = build_hf_headers() | {"accept-encoding": "identity"} | ({"range": f"bytes={have}-"} if have else {})
    with get_session().stream("GET", blob.url, headers=headers, timeout=_TIMEOUT_S, follow_redirects=True) as answer:
        hf_raise_for_status(answer)
        if have and answer.status_code != 206:  # it does not know ranges: all of it comes again
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
    else:  # a mirror with etags of its own
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
