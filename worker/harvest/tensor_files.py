"""Writes safetensors files tensor by tensor, with a digest of their bytes, and directories that are there whole or not
at all.

Errors of the disk become ConfigErrors that name the path and the remedy.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from blake3 import blake3

from contracts.errors import ConfigError
from worker.harvest.gate import Gate, within

_TYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}
#: Bytes that are digested and written in a unit.
_UNIT_BYTES = 4 << 20
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
#: A directory that is being written, or is about to be removed.
_BESIDE = "unfinished"


def write_tensors(
    path: Path,
    shapes: Mapping[str, tuple[torch.dtype, Sequence[int]]],
    tensors: Iterable[torch.Tensor],
    gate: Gate,
) -> str:
    """Writes a safetensors file of tensors with these names, types and shapes, which `tensors` yields in this order; a
    few megabytes at a time, within `gate`. Returns the hexadecimal digest of its bytes. Raises OSError, and Stopped."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in shapes.items():
        begin, end = end, end + torch.Size(shape).numel() * dtype.itemsize
        header[name] = {"dtype": _TYPES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest = blake3()
    with path.open("wb") as file:
        for part in (struct.pack("<Q", len(text)), text):
            digest.update(part)
            file.write(part)
        for (name, (dtype, shape)), tensor in zip(shapes.items(), tensors, strict=True):
            assert (tensor.dtype, list(tensor.shape)) == (dtype, list(shape)), name
            data = tensor.detach().contiguous().flatten().view(torch.uint8).numpy().data
            for first in range(0, len(data), _UNIT_BYTES):
                with within(gate):
                    digest.update(data[first : first + _UNIT_BYTES])
                    file.write(data[first : first + _UNIT_BYTES])
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def write_named(path: Path, tensors: Mapping[str, torch.Tensor], gate: Gate) -> str:
    """Writes tensors that are all in memory; see `write_tensors`."""
    return write_tensors(path, {name: (t.dtype, t.shape) for name, t in tensors.items()}, tensors.values(), gate)


def write_text(path: Path, text: str) -> None:
    """Writes a file through to the disk. Raises OSError."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def file_digest(path: Path) -> str:
    """The hexadecimal digest of a file's bytes. Raises OSError."""
    return blake3().update_mmap(path).hexdigest()


@contextlib.contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A directory to write to, which becomes `path` at the end, in place of what was there; on an error nothing is
    left of it. Raises ConfigError when the disk refuses."""
    beside = path.with_name(f".{path.name}.{_BESIDE}")
    with disk_errors(path):
        try:
            shutil.rmtree(beside, ignore_errors=True)
            beside.mkdir(parents=True)
            yield beside
            _sync(beside)
            _replace(beside, path)
        except BaseException:
            shutil.rmtree(beside, ignore_errors=True)
            raise


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turns OSErrors into ConfigErrors that name `path` and the remedy."""
    try:
        yield
    except OSError as e:
        full = "the disk is full; free space there, or choose another directory"
        remedy = full if e.errno in _FULL else f"{e.strerror}; make the directory writable, or choose another"
        raise ConfigError(f"{path} cannot be written: {remedy} (what was written before is kept)") from e


def replace_file(path: Path, text: str) -> None:
    """Writes a file beside and renames it. Raises ConfigError when the disk refuses."""
    beside = path.with_name(f".{path.name}.{_BESIDE}")
    with disk_errors(path):
        try:
            write_text(beside, text)
            beside.replace(path)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise


def remove_unfinished(directory: Path) -> None:
    """Removes what a process that was killed left behind."""
    for left in directory.glob(f".*.{_BESIDE}*"):
        if left.is_dir():
            shutil.rmtree(left, ignore_errors=True)
        else:
            left.unlink(missing_ok=True)


def _replace(beside: Path, path: Path) -> None:
    if path.exists():
        old = path.with_name(f".{path.name}.{_BESIDE}-old")
        shutil.rmtree(old, ignore_errors=True)
        path.replace(old)
        beside.replace(path)
        shutil.rmtree(old, ignore_errors=True)
    else:
        beside.replace(path)
    _sync(path.parent)


def _sync(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
