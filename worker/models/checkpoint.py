"""A checkpoint's tensors: safetensors files that stay privately mapped, so that their pages are the page cache's.

Files of a running worker must not be changed in place; replacing them by renaming is safe.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from contracts.errors import ConfigError
from contracts.kv import DTYPE_BYTES
from runtime.model_config import read_json
from worker.memory.tensors import MappedFiles

#: Old checkpoints contain the rotary embedding's frequencies, which follow from the configuration.
_DERIVED = ".rotary_emb.inv_freq"
#: How names of a text model begin within a model that also reads images, and by themselves.
_WITHIN = (("language_model.", ""), ("model.language_model.", "model."))
_OF_IMAGES = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")


class FileState(NamedTuple):
    """Identity and version of a file. A write changes `changed_ns`; a replacement changes `inode`."""

    device: int
    inode: int
    size: int
    modified_ns: int
    changed_ns: int

    @classmethod
    def of(cls, file: Path | int) -> FileState:
        """The state of a path or an open file. Raises OSError."""
        stat = os.stat(file)
        return cls(stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)


class Checkpoint:
    """The tensors of a directory's safetensors files (one file, or shards with an index), by name, mapped and not
    copied.

    states: of each file when it was opened. taken: names of requested tensors, for `check_all_taken`.
    """

    def __init__(self, directory: Path) -> None:
        """Raises ConfigError when files are missing, damaged, or do not match their index."""
        index = directory / "model.safetensors.index.json"
        single = directory / "model.safetensors"
        where = self._sharded(index) if index.exists() and not single.exists() else None
        self.files = [single] if where is None else [directory / name for name in sorted(set(where.values()))]
        self.tensors: dict[str, torch.Tensor] = {}
        self.states: dict[Path, FileState] = {}
        self.taken: set[str] = set()
        self._within: dict[str, str] = {}
        for file in self.files:
            remedy = (
                f"{index.name} names it; download it too"
                if where
                else "give --model a directory with safetensors weights"
            )
            self._open(file, remedy)
        self._mapped = MappedFiles(self.files)
        for name, file_name in (where or {}).items():
            if name not in self.tensors:
                raise ConfigError(
                    f"{directory / file_name} has no tensor {name}, which {index.name} says it has; download both again"
                )

    def _open(self, file: Path, when_missing: str) -> None:
        try:
            state = FileState.of(file)
            with safe_open(file, framework="pt") as opened:
                found = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            if FileState.of(file) != state:
                raise ConfigError(f"{file} was changed while it was opened; start again when it is whole")
        except FileNotFoundError:
            raise ConfigError(f"{file} does not exist; {when_missing}") from None
        except (SafetensorError, OSError) as e:
            raise ConfigError(f"{file} is not a readable safetensors file: {e}; download it again") from e
        twice = sorted(found.keys() & self.tensors.keys())
        if twice:
            raise ConfigError(f"{file} has tensor {twice[0]}, which another file has too; download the model again")
        self.tensors |= found
        self.states[file] = state

    def is_unchanged(self) -> bool:
        """Whether the files are those that were opened; False when they were replaced. Raises ConfigError when one was
        written to, as its mapping has changed too."""
        same = True
        for file, state in self.states.items():
            try:
                now = FileState.of(file)
            except OSError:
                same = False
                continue
            if now[:2] == state[:2] and (now.size, now.modified_ns) != (state.size, state.modified_ns):
                raise ConfigError(
                    f"{file} was changed while it was read; start again when it is whole, and replace weights by "
                    "renaming"
                )
            same = same and now == state
        return same

    @staticmethod
    def _sharded(index: Path) -> dict[str, str]:
        where = read_json(index).get("weight_map")
        if not isinstance(where, dict) or not where or not all(isinstance(name, str) for name in where.values()):
            raise ConfigError(f"{index}: weight_map must map tensor names to files; download the model again")
        names = sorted(set(where.values()))
        for name in names:
            if Path(name).name != name:
                raise ConfigError(f"{index}: {name!r} must be a file beside the index")
        return {str(tensor): str(name) for tensor, name in where.items()}

    def forget(self, tensor: torch.Tensor) -> None:
        """Drops the pages of one of these tensors from memory; reading it again loads them."""
        self._mapped.forget(tensor)

    def check_all_taken(self) -> None:
        """Raises ConfigError for a tensor that was not requested: its architecture would differ from ours."""
        extra = sorted(name for name in self.tensors.keys() - self.taken if not name.endswith(_DERIVED))
        if extra:
            more = f" and {len(extra) - 1} more" if len(extra) > 1 else ""
            raise ConfigError(
                f"{self.files[0].parent}: the checkpoint has tensor {extra[0]}{more}, which its config.json does "
                "not imply"
            )

    @property
    def bytes(self) -> int:
        """Bytes of all tensors in the checkpoint's types."""
        return sum(t.numel() * t.itemsize for t in self.tensors.values())

    @property
    def dtype(self) -> torch.dtype:
        """The type that holds most of the checkpoint's bytes, of types that can be served if it has one."""
        sizes: dict[torch.dtype, int] = {}
        for tensor in self.tensors.values():
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.numel() * tensor.itemsize
        return max(sizes, key=lambda d: (str(d).removeprefix("torch.") in DTYPE_BYTES, sizes[d]))

    def leave_images(self) -> None:
        """The model also reads images: from now on, tensors of its text model have the names of a text model, and those
        for images count as requested."""
        for name in self.tensors:
            self._within |= {own + name[len(begin) :]: name for begin, own in _WITHIN if name.startswith(begin)}
        self.taken |= {name for name in self.tensors if name.startswith(_OF_IMAGES)}

    def has(self, name: str) -> bool:
        """Whether `get` would find a tensor."""
        return self.find(name) is not None

    def find(self, name: str) -> torch.Tensor | None:
        """The tensor that `get` would find, of any type and shape."""
        return self.tensors.get(self._within.get(name, name))

    def get(self, name: str, shape: Sequence[int], dtypes: Sequence[torch.dtype] = ()) -> torch.Tensor:
        """The tensor `name`. Raises ConfigError unless it exists with this shape and one of these types (by default, a
        floating type of 16 bits or more)."""
        name = self._within.get(name, name)
        tensor = self.tensors.get(name)
        self.taken.add(name)
        if tensor is None:
            raise ConfigError(
                f"{self.files[0].parent}: the checkpoint has no tensor {name}; it does not fit its config.json"
            )
        fits = tensor.dtype in dtypes if dtypes else tensor.is_floating_point() and tensor.itemsize > 1
        if list(tensor.shape) != list(shape) or not fits:
            kinds = f" of {' or '.join(map(str, dtypes))}" if dtypes else ""
            raise ConfigError(
                f"{self.files[0].parent}: tensor {name} is {tensor.dtype} {list(tensor.shape)}, config.json "
                f"implies {list(shape)}{kinds}"
            )
        return tensor
