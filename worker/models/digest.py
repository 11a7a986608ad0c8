"""The identity of a model: a digest of its weights' names, types, shapes and bytes, and of its architecture.

The KV fingerprint is computed from it, so it must not depend on paths, times or the sharding of the checkpoint. Reading
all bytes takes time, so the result is cached in a directory. A cache entry is found by the files' identity (path,
device, inode, size, mtime, ctime) and a sample of their bytes, so a copy with a preserved mtime (`cp -p`, reproducible
images) is a different file. These do not enter the digest. `upbeat doctor` recomputes and compares it:

    .venv/bin/python -m worker.models.digest MODEL CACHE      {"remembered": hex or null, "computed": hex}
"""

from __future__ import annotations

import json
import os
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from blake3 import blake3

from contracts.errors import ConfigError
from runtime.model_config import ModelConfig
from worker.models.checkpoint import Checkpoint, FileState

#: Samples read from each file for the cache entry, evenly spaced, and their size.
_SAMPLES, _SAMPLE_BYTES = 17, 4096
_TIMES_DIFFER_S = 2.0


def weights_digest(tensors: dict[str, torch.Tensor], forget: Callable[[torch.Tensor], object]) -> bytes:
    """32 bytes over (name, dtype, shape, bytes) of all tensors, ordered by name. `forget` is called with each tensor
    after use."""
    digest = blake3(b"upbeat weights", max_threads=blake3.AUTO)
    for name in sorted(tensors):
        tensor = tensors[name]
        head = json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode()
        digest.update(struct.pack("<I", len(head)) + head)
        if tensor.numel():
            digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
            forget(tensor)
    return digest.digest()


def cached_weights_digest(checkpoint: Checkpoint, cache_dir: Path | None, now_s: float | None = None) -> bytes:
    """The digest of a checkpoint's tensors, cached in `cache_dir` (None: not cached) while its files do not change.

    now_s: wall clock. Raises ConfigError when a file was changed in place while it was read.
    """
    if cache_dir is None:
        return weights_digest(checkpoint.tensors, checkpoint.forget)
    entry = _entry(checkpoint, cache_dir)
    known = _read(entry)
    if known is not None:
        return known
    digest = weights_digest(checkpoint.tensors, checkpoint.forget)
    same = checkpoint.is_unchanged()
    if entry is not None and same and _settled(checkpoint, time.time() if now_s is None else now_s):
        cache_dir.mkdir(parents=True, exist_ok=True)
        temporary = entry.with_suffix(f".{os.getpid()}")
        temporary.write_text(digest.hex() + "\n")
        temporary.replace(entry)
    return digest


def _entry(checkpoint: Checkpoint, cache_dir: Path) -> Path | None:
    """The cache entry for these files; None when they are not those that were opened, or cannot be read."""
    found = blake3(b"upbeat weight files 2")
    for file, state in sorted(checkpoint.states.items()):
        try:
            with file.open("rb") as opened:
                if FileState.of(opened.fileno()) != state:
                    return None
                found.update(json.dumps([str(file.resolve()), *state]).encode())
                for n in range(_SAMPLES):
                    found.update(
                        os.pread(
                            opened.fileno(),
                            _SAMPLE_BYTES,
                            (state.size - _SAMPLE_BYTES) * n // (_SAMPLES - 1) if n else 0,
                        )
                    )
        except OSError:
            return None
    return cache_dir / f"weights-{found.hexdigest()[:32]}.digest"


def _read(entry: Path | None) -> bytes | None:
    try:
        known = bytes.fromhex(entry.read_text().strip()) if entry is not None else b""
    except (OSError, ValueError):
        return None
    return known if len(known) == 32 else None


def _settled(checkpoint: Checkpoint, now_s: float) -> bool:
    """Whether a later change of the files would change their times, which some file systems keep in whole seconds."""
    newest_ns = max(max(state.modified_ns, state.changed_ns) for state in checkpoint.states.values())
    return now_s - newest_ns / 1e9 > _TIMES_DIFFER_S


def model_digest(weights: bytes, config: ModelConfig) -> bytes:
    """32 bytes over the weights' digest and all of `config` that affects KV, such as the rotary base. End tokens and
    the length limit do not."""
    said = asdict(config)
    for name in ("architecture", "eos_ids", "max_tokens", "dtype"):
        del said[name]
    for name in ("experts", "gemma", "quantisation"):  # what others lack is not said, so that their caches outlive it
        if said[name] is None:
            del said[name]
    return blake3(b"upbeat model" + weights + json.dumps(said, sort_keys=True).encode()).digest()


def main(directory: Path, cache_dir: Path) -> None:
    """Prints the cached and the computed digest of the model in `directory`. Raises ConfigError when it cannot be
    read."""
    checkpoint = Checkpoint(directory)
    remembered = _read(_entry(checkpoint, cache_dir))
    computed = weights_digest(checkpoint.tensors, checkpoint.forget)
    print(json.dumps({"remembered": remembered and remembered.hex(), "computed": computed.hex()}))


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), Path(sys.argv[2]))
    except ConfigError as e:
        print(e, file=sys.stderr)
        raise SystemExit(2) from e
