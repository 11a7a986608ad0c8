"""Downloads a hub model: which files serving needs, and whether the model can be served and fits on the disk.

Checks go from cheap to expensive: the hub's list of files, config.json (refuses models that cannot be served), disk
space, then weights. Files go to the hub's cache (HF_HUB_CACHE, HF_HOME), shared with other programs. The hub's token,
HF_ENDPOINT and HF_HUB_OFFLINE apply. If the hub cannot be reached, a complete copy in the cache is used.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import httpx2
from huggingface_hub import HfApi, constants, get_hf_file_metadata, get_token, hf_hub_download, hf_hub_url
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import disable_progress_bars
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from contracts.errors import ConfigError
from runtime.elsewhere import without_weights
from runtime.hub_download import Blob, download
from runtime.model_config import load_config, read_json
from runtime.model_names import HubId

#: Files that serving reads besides the weights; the first two are required.
_SMALL = ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
#: Free space that a download leaves on the disk.
_SPARE_BYTES = 256 << 20
_AT_A_TIME = 4
_ASK_S = 20.0


def tell(line: str) -> None:
    """Prints one line to stderr for the user."""
    print(f"upbeat: {line}", file=sys.stderr, flush=True)


@dataclass(frozen=True, slots=True)
class Found:
    """A model found on the hub. directory: its snapshot in the cache. blobs: the weights, partly downloaded already.

    small: names of its other files. missing_bytes, total_bytes: of the weights.
    """

    model: HubId
    commit: str
    directory: Path
    blobs: tuple[Blob, ...]
    small: tuple[str, ...]

    @property
    def missing_bytes(self) -> int:
        return sum(blob.missing_bytes for blob in self.blobs)

    @property
    def is_here(self) -> bool:
        """Whether every file is in the snapshot."""
        return all((self.directory / name).exists() for name in (*self.small, *(blob.name for blob in self.blobs)))

    @property
    def total_bytes(self) -> int:
        return sum(blob.size for blob in self.blobs)


def directory_of(model: HubId, flag: str, say: Callable[[str], None] = tell) -> Path:
    """The directory of `model`, downloaded if necessary. flag: its name in errors, such as `--model`.

    Raises ConfigError with the remedy: not found, no permission, cannot be served, no disk space, no network.
    """
    found = look_up(model, flag, say)
    if isinstance(found, Path):
        return found
    check_room(found, flag)
    try:
        if found.missing_bytes:
            gib = f"{found.missing_bytes / 2**30:.2f} GiB of {found.total_bytes / 2**30:.2f} GiB"
            say(f"downloading {model} ({gib}) into {constants.HF_HUB_CACHE}")
            _download_all(found)
        for name in (*found.small, *(blob.name for blob in found.blobs)):
            hf_hub_download(model.repo, name, revision=found.commit)
        _remember(model, found.commit)
    except (httpx2.HTTPError, HfHubHTTPError, OSError) as e:
        raise _explained(e, model, flag, "what has come is kept: start again to go on") from e
    return found.directory


def look_up(model: HubId, flag: str, say: Callable[[str], None] = tell) -> Found | Path:
    """The model on the hub, or the path of a complete cached copy if the hub cannot or need not be asked. Downloads no
    weights.

    Raises ConfigError, also when the model cannot be served.
    """
    disable_progress_bars()
    kept = _kept(model)
    if kept is not None and kept.name == model.revision:
        _check_kind(kept, model, flag)
        return kept
    try:
        return _ask(model, flag)
    except (RepositoryNotFoundError, RevisionNotFoundError) as e:
        raise _explained(e, model, flag) from e
    except (httpx2.HTTPError, HfHubHTTPError, OSError) as e:
        if kept is None or _is_refusal(e):
            raise _explained(e, model, flag) from e
        _check_kind(kept, model, flag)
        if not isinstance(e, OfflineModeIsEnabled):
            say(
                f"{constants.ENDPOINT} cannot be asked ({_reason(e)}); using the copy of {model} in "
                f"{constants.HF_HUB_CACHE}"
            )
        return kept


def check_room(found: Found, flag: str) -> None:
    """Raises ConfigError when the disk lacks space for the missing bytes of `found`."""
    cache = Path(constants.HF_HUB_CACHE)
    there = next(place for place in (cache, *cache.parents) if place.exists())
    free = shutil.disk_usage(there).free
    need = found.missing_bytes + (_SPARE_BYTES if found.missing_bytes else 0)
    if need > free:
        raise ConfigError(
            f"{flag} {found.model}: {need / 2**30:.2f} GiB of disk are needed in {cache}, {free / 2**30:.2f} GiB "
            "are free; "
            "free some space, or set HF_HOME to a directory on a larger disk"
        )


def _ask(model: HubId, flag: str) -> Found:
    api = HfApi()
    info = api.model_info(model.repo, revision=model.revision, timeout=_ASK_S)
    commit = str(info.sha)
    names = {entry.path for entry in api.list_repo_tree(model.repo, revision=commit) if isinstance(entry, RepoFile)}
    if _SINGLE not in names and _INDEX not in names and (why := without_weights(names)):
        raise ConfigError(f"{flag} {model}: it has no {_SINGLE}: {why}")
    for name in ("config.json", _SINGLE if _INDEX not in names else _INDEX):
        _check_has(name, names, model, flag)
    directory = Path(hf_hub_download(model.repo, "config.json", revision=commit)).parent
    _check_kind(directory, model, flag)
    _check_has("tokenizer.json", names, model, flag)
    small = tuple(name for name in _SMALL if name in names)
    weights: tuple[str, ...] = (_SINGLE,)
    if _SINGLE not in names:
        hf_hub_download(model.repo, _INDEX, revision=commit)
        small, weights = (*small, _INDEX), _shards(directory, model, flag)
        absent = sorted(set(weights) - names)
        if absent:
            raise ConfigError(
                f"{flag} {model}: {_INDEX} names {absent[0]}, which is not there; its publisher must upload it"
            )
    return Found(model, commit, directory, tuple(_blob(model, commit, directory / name) for name in weights), small)


def _check_has(name: str, names: Collection[str], model: HubId, flag: str) -> None:
    if name not in names:
        raise ConfigError(
            f"{flag} {model}: it has no {name}; give a model with config.json, tokenizer.json and *.safetensors"
        )


def _blob(model: HubId, commit: str, pointer: Path) -> Blob:
    """pointer: the file's path in the snapshot, existing or not."""
    url = hf_hub_url(model.repo, pointer.name, revision=commit)
    if pointer.exists():
        return Blob(pointer.name, url, "", pointer.stat().st_size, pointer)
    said = get_hf_file_metadata(url)
    if not said.etag or said.size is None or "/" in said.etag:
        raise OSError(f"{url} has no etag or size")
    return Blob(pointer.name, url, said.etag, said.size, _folder(model) / "blobs" / said.etag)


def _shards(directory: Path, model: HubId, flag: str) -> tuple[str, ...]:
    where = read_json(directory / _INDEX).get("weight_map")
    names = set(where.values()) if isinstance(where, dict) else set()
    if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise ConfigError(
            f"{flag} {model}: {_INDEX} does not say which files beside it have the weights; give another model"
        )
    return tuple(sorted(names))


def _check_kind(directory: Path, model: HubId, flag: str) -> None:
    try:
        load_config(directory)
    except ConfigError as e:
        raise ConfigError(f"{flag} {model}: {str(e).removeprefix(f'{directory}/')}") from None


def _download_all(found: Found) -> None:
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    stop = threading.Event()
    with (
        Progress(*columns, console=console, disable=not console.is_terminal) as bar,
        ThreadPoolExecutor(_AT_A_TIME) as pool,
    ):
        task = bar.add_task(
            found.model.repo, total=found.total_bytes, completed=found.total_bytes - found.missing_bytes
        )
        tasks = [pool.submit(download, blob, lambda n: bar.advance(task, n), stop.is_set) for blob in found.blobs]
        try:
            for done in as_completed(tasks):
                done.result()
        except BaseException:
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def _folder(model: HubId) -> Path:
    return Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=model.repo, repo_type="model")


def _remember(model: HubId, commit: str) -> None:
    """Records the revision's commit, as the hub's library does, so that it is found without the hub."""
    revision = model.revision or constants.DEFAULT_REVISION
    note = _folder(model) / "refs" / revision
    if revision != commit and not (note.is_file() and note.read_text() == commit):
        note.parent.mkdir(parents=True, exist_ok=True)
        temporary = note.with_name(f"{note.name}.{os.getpid()}")
        temporary.write_text(commit)
        temporary.replace(note)


def _kept(model: HubId) -> Path | None:
    """The cached snapshot, if it has every file that serving needs."""
    revision = model.revision or constants.DEFAULT_REVISION
    note = _folder(model) / "refs" / revision
    commit = note.read_text().strip() if note.is_file() else revision
    snapshot = _folder(model) / "snapshots" / commit
    weights: tuple[str, ...] = (_SINGLE,)
    try:
        if not (snapshot / _SINGLE).exists():
            weights = (_INDEX, *_shards(snapshot, model, ""))
    except ConfigError:
        return None
    return snapshot if all((snapshot / name).exists() for name in (*_SMALL[:2], *weights)) else None


def _is_refusal(e: Exception) -> bool:
    return isinstance(e, HfHubHTTPError) and e.response.status_code in (401, 403)


def _reason(e: Exception) -> str:
    return (str(e).strip().splitlines() or [type(e).__name__])[0]


def _explained(e: Exception, model: HubId, flag: str, beside: str = "") -> ConfigError:
    """The hub's error as one sentence with its remedy."""
    hub, name = constants.ENDPOINT, f"{flag} {model}"
    rights = "log in with `hf auth login`, or set HF_TOKEN to a token that may read it"
    if isinstance(e, GatedRepoError):
        return ConfigError(f"{name}: it is gated; accept its terms at {hub}/{model.repo}, then {rights}")
    if isinstance(e, RevisionNotFoundError):
        return ConfigError(
            f"{name}: {hub}/{model.repo} has no such revision; give a branch, a tag or a commit that it has, or none"
        )
    anonymous = isinstance(e, HfHubHTTPError) and e.response.status_code == 401 and get_token() is None
    if _is_refusal(e) and not anonymous and not isinstance(e, RepositoryNotFoundError):
        return ConfigError(f"{name}: {hub} refuses the token, or it has no right to this model; {rights}")
    if anonymous or isinstance(e, RepositoryNotFoundError):  # without a token, missing models also give 401
        return ConfigError(
            f"{name}: {hub} has no such model, or it is private; check the spelling; if it is private, {rights}"
        )
    if isinstance(e, OfflineModeIsEnabled):
        where = constants.HF_HUB_CACHE
        return ConfigError(
            f"{name}: no whole copy is in {where}, and HF_HUB_OFFLINE forbids to ask the hub; unset it, or give a "
            "directory"
        )
    if isinstance(e, (httpx2.HTTPError, HfHubHTTPError)):
        more = beside or f"and no whole copy is in {constants.HF_HUB_CACHE}"
        return ConfigError(
            f"{name}: {hub} failed ({_reason(e)}), {more}; check the network and HF_ENDPOINT, or give a directory"
        )
    return ConfigError(
        f"{name}: it cannot be kept in {constants.HF_HUB_CACHE} ({_reason(e)}); free some space there, or set HF_HOME"
    )
