"""What identifies weights: the content of a model's or an adapter's files, never their path.

Reading every byte takes a while, so a file's digest is remembered by device, inode, size and times. Files of the hub's
cache are links to blobs that are named by their content: their names do.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from blake3 import blake3

_WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf", ".npz")
_SHA256 = re.compile(r"[0-9a-f]{64}")


def directory_digest(directory: Path, cache: Path) -> bytes:
    """32 bytes over the names and contents of weights and configuration in `directory`. Raises FileNotFoundError
    when it holds none."""
    files = sorted(
        file
        for file in directory.iterdir()
        if file.is_file() and (file.suffix in _WEIGHTS or file.name in ("config.json", "adapter_config.json"))
    )
    if not any(file.suffix in _WEIGHTS for file in files):
        raise FileNotFoundError(f"{directory} holds no weights ({', '.join(_WEIGHTS)})")
    digest = blake3(b"upbeat model files")
    for file in files:
        digest.update(f"{file.name}\0".encode() + _file_digest(file, cache))
    return digest.digest()


def _file_digest(file: Path, cache: Path) -> bytes:
    resolved = file.resolve()
    if file.is_symlink() and _SHA256.fullmatch(resolved.name) and resolved.parent.name == "blobs":
        return bytes.fromhex(resolved.name)
    state = resolved.stat()
    named = [str(resolved), state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns]
    entry = cache / f"file-{blake3(json.dumps(named).encode()).hexdigest()[:32]}.digest"
    try:
        known = bytes.fromhex(entry.read_text().strip())
        if len(known) == 32:
            return known
    except (OSError, ValueError):
        pass
    found = blake3(max_threads=blake3.AUTO).update_mmap(str(resolved)).digest()
    after = resolved.stat()
    if (after.st_size, after.st_mtime_ns, after.st_ctime_ns) == (state.st_size, state.st_mtime_ns, state.st_ctime_ns):
        cache.mkdir(parents=True, exist_ok=True)
        entry.write_text(found.hex() + "\n")
    return found
