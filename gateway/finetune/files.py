"""The files that tenants have uploaded, and results of their jobs.

DATA/files/TENANT/: ID.bin is a file's content, ID.json what is said of it, ID.part an upload that arrives. Ids are
drawn here, so no name that a caller gives is ever a path. DATA/adapters/TENANT/JOB/ is a job's own directory, with hard
links to its data, so that it goes on when its file is deleted. All processes of a gateway share them. Every function
blocks and may raise OSError; call them on another thread.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

from contracts.errors import InvalidRequest, NotFound, Unavailable

_ID = re.compile(r"file-[0-9a-f]{32}")
#: Files of a tenant at most, and seconds after which something that nobody writes any more is left over.
MOST_FILES, STALE_S = 1000, 900.0
RESULTS = "fine-tune-results"
#: What names a file's content among all of a disk, and its bytes.
_Size = tuple[tuple[int, int], int]


@dataclass(frozen=True, slots=True)
class Info:
    """A file. created_s: since the epoch."""

    id: str
    bytes_: int
    created_s: float
    filename: str
    purpose: str


class Files:
    """See the module."""

    def __init__(self, data: Path, quota_bytes: int, disk_reserve: float) -> None:
        """quota_bytes: of a tenant's files and jobs together. disk_reserve: share of the disk that stays free."""
        self._files, self._jobs = data / "files", data / "adapters"
        self._quota_bytes, self._disk_reserve = quota_bytes, disk_reserve
        #: By tenant, what was read at the last look, by name: files do not change, they come and go.
        self._infos: dict[str, dict[str, Info]] = {}
        self._sizes: dict[str, dict[str, _Size]] = {}

    # ---- places ------------------------------------------------------------------------------------------------
    def _of(self, tenant: str) -> Path:
        return self._files / _folder(tenant)

    def job_place(self, tenant: str, job_id: str) -> Path:
        """A job's own directory."""
        return self._jobs / _folder(tenant) / job_id

    def job_places(self, tenant: str) -> list[Path]:
        """Those that exist."""
        folder = self._jobs / _folder(tenant)
        return [path for path in sorted(folder.iterdir()) if path.is_dir()] if folder.is_dir() else []

    # ---- room --------------------------------------------------------------------------------------------------
    def check_room(self, tenant: str, wanted: int) -> None:
        """Raises InvalidRequest when the tenant's quota has no room for so many bytes more, Unavailable when the disk
        has not."""
        used = self.used(tenant)
        if used + wanted > self._quota_bytes:
            raise InvalidRequest(
                f"your files and jobs hold {used} of {self._quota_bytes} bytes; delete files, or ask for a larger "
                "finetune.files_gib",
                param="file",
                code="storage_quota_exceeded",
            )
        self._files.mkdir(parents=True, exist_ok=True)
        disk = shutil.disk_usage(self._files)
        if disk.free - wanted < self._disk_reserve * disk.total:
            raise Unavailable("this server's disk is full; try again later")

    def used(self, tenant: str) -> int:
        """Bytes of a tenant's files and jobs; what several names share counts once."""
        known, kept = self._sizes.get(tenant, {}), dict[str, _Size]()
        entries = {entry.name: entry for entry in _walk(self._of(tenant))}
        found = [size for entry in _walk(self._jobs / _folder(tenant)) if (size := _size(entry)) is not None]
        for name, entry in entries.items():
            if (size := known.get(name) or _size(entry)) is not None:
                found.append(size)
                if _says(name) or f"{name.removesuffix('.bin')}.json" in entries:  # else it may still grow
                    kept[name] = size
        self._sizes[tenant] = kept
        return sum(dict(found).values())

    # ---- uploads -----------------------------------------------------------------------------------------------
    def begin(self, tenant: str) -> tuple[str, BinaryIO]:
        """A new file's id, and where its content goes. Raises InvalidRequest when the tenant has too many."""
        folder = self._of(tenant)
        folder.mkdir(parents=True, exist_ok=True)
        names = set(os.listdir(folder))
        self._sweep(folder, names)
        if sum(map(_says, names)) >= MOST_FILES:
            raise InvalidRequest(f"you have {MOST_FILES} files; delete some", param="file", code="too_many_files")
        file_id = f"file-{secrets.token_hex(16)}"
        return file_id, (folder / f"{file_id}.part").open("xb")

    def commit(self, tenant: str, file_id: str, content: BinaryIO, filename: str, purpose: str) -> Info:
        """The upload is complete."""
        content.flush()
        os.fsync(content.fileno())
        size = content.tell()
        content.close()
        folder = self._of(tenant)
        (folder / f"{file_id}.part").rename(folder / f"{file_id}.bin")
        return self._say(folder, Info(file_id, size, time.time(), filename, purpose))

    def give_up(self, tenant: str, file_id: str, content: BinaryIO) -> None:
        """The upload ended before its end."""
        with contextlib.suppress(OSError):
            content.close()
            (self._of(tenant) / f"{file_id}.part").unlink(missing_ok=True)

    def _say(self, folder: Path, info: Info) -> Info:
        _write(folder / f"{info.id}.json", json.dumps(asdict(info)))
        return info

    def _sweep(self, folder: Path, names: set[str]) -> None:
        """Remove what a killed process has left over. names: of what is in the folder."""
        before = time.time() - STALE_S
        for name in names:
            said = f"{name.removesuffix('.bin')}.json"
            if not name.endswith(".part") and (not name.endswith(".bin") or said in names):
                continue
            with contextlib.suppress(OSError):
                if (folder / name).stat().st_mtime < before and not (folder / said).exists():
                    (folder / name).unlink()

    # ---- files -------------------------------------------------------------------------------------------------
    def get(self, tenant: str, file_id: str) -> Info:
        """Raises NotFound."""
        info = _read(self._of(tenant) / f"{file_id}.json") if _ID.fullmatch(file_id) else None
        if info is None:
            raise NotFound(f"there is no file {file_id[:80]!r}", param="file_id", code="file_not_found")
        return info

    def content(self, tenant: str, file_id: str) -> Path:
        """Where its content lies. Raises NotFound."""
        return self._of(tenant) / f"{self.get(tenant, file_id).id}.bin"

    def listed(self, tenant: str) -> list[Info]:
        """The newest first."""
        folder, known, found = self._of(tenant), self._infos.get(tenant, {}), dict[str, Info]()
        for name in filter(_says, os.listdir(folder) if folder.is_dir() else ()):
            if (info := known.get(name) or _read(folder / name)) is not None:
                found[name] = info
        self._infos[tenant] = found
        return sorted(found.values(), key=lambda i: (-i.created_s, i.id))

    def delete(self, tenant: str, file_id: str) -> None:
        """Raises NotFound."""
        path = self.content(tenant, file_id)
        path.with_suffix(".json").unlink(missing_ok=True)
        path.unlink(missing_ok=True)

    # ---- jobs --------------------------------------------------------------------------------------------------
    def link(self, tenant: str, file_id: str, to: Path) -> None:
        """Give a job a file's content under a name of its own. Raises NotFound."""
        to.parent.mkdir(parents=True, exist_ok=True)
        try:
            _link(self.content(tenant, file_id), to)
        except FileNotFoundError:
            raise NotFound(f"there is no file {file_id[:80]!r}", param="file_id", code="file_not_found") from None

    def results(self, tenant: str, job_id: str) -> list[str] | None:
        """Ids of a job's result files; None: they were not kept yet."""
        try:
            found = json.loads((self._of(tenant) / f"{job_id}.results").read_text())
        except (OSError, ValueError):
            return None
        return [str(file_id) for file_id in found]

    def keep_results(self, tenant: str, job_id: str, names: dict[str, Path | bytes]) -> list[str]:
        """Make a job's results files of its tenant. names: where each lies, or its content. They stay when the tenant
        is over its quota."""
        folder = self._of(tenant)
        folder.mkdir(parents=True, exist_ok=True)
        ids = []
        for name, source in names.items():
            file_id = f"file-{secrets.token_hex(16)}"
            path = folder / f"{file_id}.bin"
            if isinstance(source, bytes):
                path.write_bytes(source)
            else:
                _link(source, path)
            self._say(folder, Info(file_id, path.stat().st_size, time.time(), name, RESULTS))
            ids.append(file_id)
        path = folder / f"{job_id}.results"
        try:
            _write(path, json.dumps(ids), replace=False)
        except FileExistsError:  # another process was faster
            for file_id in ids:
                self.delete(tenant, file_id)
            return self.results(tenant, job_id) or []
        return ids


def _folder(tenant: str) -> str:
    """A tenant's directory. A leading dot is escaped; other names are valid file names."""
    return f"%2E{tenant[1:]}" if tenant.startswith(".") else tenant


def _says(name: str) -> bool:
    """Whether it is what is said of a file."""
    return name.startswith("file-") and name.endswith(".json")


def _size(entry: os.DirEntry[str]) -> _Size | None:
    with contextlib.suppress(OSError):
        stat = entry.stat(follow_symlinks=False)
        return (stat.st_dev, stat.st_ino), stat.st_size
    return None


def _link(source: Path, to: Path) -> None:
    """A hard link, or a copy where there are none."""
    try:
        os.link(source, to, follow_symlinks=False)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copyfile(source, to, follow_symlinks=False)


def _write(path: Path, text: str, *, replace: bool = True) -> None:
    """Write atomically. Raises FileExistsError when it exists and may not be replaced."""
    draft = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}.part")
    with draft.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    if replace:
        draft.replace(path)
        return
    try:
        os.link(draft, path)
    finally:
        draft.unlink()


def _read(path: Path) -> Info | None:
    try:
        data = json.loads(path.read_text())
        return Info(**data)
    except (OSError, ValueError, TypeError):
        return None


def _walk(folder: Path) -> Iterator[os.DirEntry[str]]:
    """All files below a directory; links are not followed."""
    waiting = [folder]
    while waiting:
        with contextlib.suppress(OSError), os.scandir(waiting.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(Path(entry.path))
                else:
                    yield entry
