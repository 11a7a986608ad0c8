"""What the SSD holds, found at the start: the directory is the index.

A name says which chunk a file is, and its folder which model. So a start lists names, and reads a few headers per
folder for the shape; the header of a listed file is checked with the first read of its chunk (docs/design/0041). Every
header is read in a folder where that is not enough: files went through a codec, and only headers have their lengths, or
the sampled headers disagree.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from contracts.errors import PieceLost
from contracts.kv import KEY_BYTES, KvShape
from kvstore.core.events import FoundCopy
from kvstore.failpoints import reach
from kvstore.tiers.cluster_keys import ClusterKeys
from kvstore.tiers.encoded import read_header
from kvstore.tiers.encoded_files import EncodedFiles
from kvstore.tiers.format import RAW, Header

#: Headers that are read per folder.
_SAMPLE = 64


def folder_name(fingerprint: bytes) -> str:
    """The part of a chunk's path that names its model, on disk and in blob."""
    return fingerprint.hex()[:16]


@dataclass(slots=True)
class Recovery:
    """What was found. copies: chunks whose headers were read. listed: by shape, keys of files without a codec whose
    headers were not. deleted: number of deleted files."""

    copies: list[FoundCopy] = field(default_factory=list)
    listed: list[tuple[KvShape, list[bytes]]] = field(default_factory=list)
    deleted: int = 0

    @property
    def chunks(self) -> int:
        """Number of chunks found."""
        return len(self.copies) + sum(len(keys) for _, keys in self.listed)


def recover(root: Path, cluster: ClusterKeys, encoded: EncodedFiles) -> Recovery:
    """List the chunks; delete temporary and foreign files, and damaged ones whose headers are read. Raises OSError when
    a directory cannot be read.

    A file that cannot be read now is kept but not served.
    """
    found = Recovery()
    for folder in sorted(p for p in root.iterdir() if p.is_dir() and not p.is_symlink()):
        keys = _keys_in(folder, found)
        shape = None if encoded.encodes else _common_shape(folder, cluster, keys)
        if shape is not None:
            found.listed.append((shape, keys))
        else:
            for key in keys:
                _look(folder / key.hex(), cluster, encoded, found)
    return found


def _keys_in(folder: Path, found: Recovery) -> list[bytes]:
    """The keys that the folder's files are named by. Deletes files with other names, and what is no file."""
    keys: list[bytes] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            reach("recover.between_files")
            if entry.is_dir(follow_symlinks=False):
                continue
            name = entry.name
            try:
                key = bytes.fromhex(name)
            except ValueError:
                key = b""
            if len(key) == KEY_BYTES and key.hex() == name and entry.is_file(follow_symlinks=False):
                keys.append(key)
            else:
                _delete(Path(entry.path), found)
    return keys


def _common_shape(folder: Path, cluster: ClusterKeys, keys: Sequence[bytes]) -> KvShape | None:
    """The shape of the folder's chunks, by a sample of their headers; None when those say more than one, none, or that
    a file is encoded."""
    shapes: set[KvShape] = set()
    for key in keys[:: max(1, len(keys) // _SAMPLE)]:
        with contextlib.suppress(PieceLost, OSError):
            header = header_of(cluster, folder / key.hex())
            if header.layout.codec != RAW:
                return None
            shapes.add(header.shape)
    return shapes.pop() if len(shapes) == 1 else None


def _look(path: Path, cluster: ClusterKeys, encoded: EncodedFiles, found: Recovery) -> None:
    """Read the file's header."""
    try:
        header = header_of(cluster, path)
    except PieceLost:
        _delete(path, found)
    except OSError as e:
        if e.errno == errno.ELOOP:
            _delete(path, found)
    else:
        if encoded.found(header):
            encoded_bytes = header.layout.object_bytes if header.layout.codec != RAW else 0
            found.copies.append(FoundCopy(header.key, header.shape, header.checksums, encoded_bytes))


def _delete(path: Path, found: Recovery) -> None:
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
        found.deleted += 1


def header_of(cluster: ClusterKeys, path: Path) -> Header:
    """The header of a chunk's file. Raises PieceLost when it is damaged, or is not what the file's name, folder and
    length say; OSError when it cannot be read."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        found = read_header(cluster, fd)
    finally:
        os.close(fd)
    if found.key.hex() != path.name or folder_name(found.shape.fingerprint) != path.parent.name:
        raise PieceLost("name or model do not match the header")
    return found
