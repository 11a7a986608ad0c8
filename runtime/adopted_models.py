"""Models that were made here and are served beside those of the configuration: one file each, DATA/models/NAME.json.

The scheduler writes a file when a fine-tuning job that registers its model has succeeded. Workers read all files when
they start. A model of the configuration wins over an adopted one of its name. Whatever is wrong with a file, or with a
model's directory, is logged, and that model is left out.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from contracts.errors import ConfigError
from contracts.finetune import MOST_NAME
from runtime import telemetry
from runtime.config import Config
from runtime.config_checks import check
from runtime.model_config import adapter_digest
from runtime.registered_model import RegisteredModel
from runtime.registry import registered

log = telemetry.logger("runtime.adopted_models")
FORMAT: Final = 1
#: Bytes of a file, and number of adopted models.
MOST_BYTES, MOST_MODELS = 64 << 10, 1000
#: What an adopted model takes from its base's configuration.
INHERITED = ("nodes", "dtype", "ttft_s", "tpot_s", "priority")
_READABLE = 64


@dataclass(frozen=True, slots=True)
class Adopted:
    """An adopted model. base: the name of the model that it was made from. entry: as if the configuration had it.
    adopted_s: when its file was written, since the epoch."""

    name: str
    base: str
    entry: RegisteredModel
    adopted_s: float


def directory_of(config: Config) -> Path:
    """Where the files are."""
    return config.data / "models"


def file_name(name: str) -> str:
    """The file of a model: a readable beginning, and a digest that keeps names apart. No separator or leading dot."""
    readable = re.sub(r"[^A-Za-z0-9_-]", "_", name)[:_READABLE]
    return f"{readable}-{hashlib.sha256(name.encode(errors='surrogatepass')).hexdigest()[:16]}.json"


def adopt(config: Config, name: str, base: str, path: Path) -> None:
    """Write the file of a model whose merged weights lie in `path`, atomically. Raises ConfigError when the model
    cannot be served, and OSError."""
    if (wrong := _wrong_name(name)) or name in registered(config):
        raise ConfigError(f"{name[:MOST_NAME]!r}: {wrong or 'the configuration has a model of this name'}")
    _check_merged(path)
    known = adopted(config).get(name)
    if known is not None and known.entry.path != path:
        raise ConfigError(f"{name} is served already, from {known.entry.path}; remove that one, or give another suffix")
    said = registered(config).get(base)
    entry = {key: getattr(said, key) for key in INHERITED} if said is not None else _inherited(config, base)
    directory = directory_of(config)
    if not (directory / file_name(name)).exists() and len(list(_files(directory))) >= MOST_MODELS:
        raise ConfigError(f"{directory} has {MOST_MODELS} models; remove some")
    _replace(
        directory / file_name(name), {"format": FORMAT, "name": name, "base": base, "path": str(path)} | dict(entry)
    )


def remove(config: Config, name: str) -> bool:
    """Remove the model's file; workers serve it until they start again. Whether it was there. Raises OSError."""
    try:
        (directory_of(config) / file_name(name)).unlink()
    except FileNotFoundError:
        return False
    return True


def adopted(config: Config) -> dict[str, Adopted]:
    """Every adopted model that can be served, by name, the oldest first."""
    found: dict[str, Adopted] = {}
    for path in _files(directory_of(config)):
        try:
            model = _read(path)
            _check_merged(model.entry.path)
        except (OSError, ValueError, RecursionError, ConfigError) as e:
            log.warning("an adopted model is left out", path=str(path), error=str(e)[:300])
            continue
        if model.name in registered(config):
            log.warning("an adopted model is left out: the configuration has its name", model=model.name)
            continue
        found[model.name] = model
    return dict(sorted(found.items(), key=lambda item: (item[1].adopted_s, item[0])))


def with_adopted(config: Config) -> Config:
    """`config` as if it had the adopted models too, behind its own; those that contradict it are left out."""
    for model in adopted(config).values():
        models = {**registered(config), model.name: model.entry}
        more = config.model_copy(update={"models": models, "model_name": config.served_model})
        try:
            check(more)
        except ConfigError as e:
            log.warning("an adopted model is left out", model=model.name, error=str(e))
            continue
        config = more
    return config


def _inherited(config: Config, base: str) -> dict[str, Any]:
    """The settings of a base that was adopted itself."""
    known = adopted(config).get(base)
    if known is None:
        raise ConfigError(f"{base}: neither the configuration nor {directory_of(config)} has this model")
    return {key: getattr(known.entry, key) for key in INHERITED}


def _wrong_name(name: str) -> str:
    """Why a model cannot have this name; empty: it can."""
    if not name or len(name) > MOST_NAME or not name.isprintable():
        return f"give a name of 1 to {MOST_NAME} printable characters"
    return ""


def _check_merged(path: Path) -> None:
    """Raises ConfigError unless a merged model lies there."""
    if not path.is_absolute() or not path.is_dir():
        raise ConfigError(f"{path} is no directory; train the model again, or remove it")
    if not adapter_digest(path):
        raise ConfigError(f"{path} is no merged model; train the model again, or remove it")


def _files(directory: Path) -> Iterator[Path]:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        yield from sorted(path for path in directory.iterdir() if path.suffix == ".json")


def _read(path: Path) -> Adopted:
    """Raises OSError and ValueError."""
    # O_NONBLOCK: a pipe would wait for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is no regular file")
        text = file.read(MOST_BYTES + 1)
    if len(text) > MOST_BYTES:
        raise ValueError(f"it has more than {MOST_BYTES} bytes")
    data = json.loads(text)
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ValueError(f"it is no adopted model of format {FORMAT}")
    name, base = data.get("name"), data.get("base")
    if not isinstance(name, str) or not isinstance(base, str) or _wrong_name(name):
        raise ValueError("its name is none")
    if file_name(name) != path.name:
        raise ValueError(f"it has the name of another file, {file_name(name)}")
    if not isinstance(data.get("path"), str) or not data["path"].startswith("/") or "\0" in data["path"]:
        raise ValueError("its path is not absolute")
    try:
        entry = RegisteredModel.model_validate({key: data[key] for key in ("path", *INHERITED) if key in data})
    except ValidationError as e:
        raise ValueError(f"its settings are wrong: {e.errors()[0]['msg']}") from None
    return Adopted(name, base, entry, status.st_mtime)


def _replace(path: Path, data: dict[str, Any]) -> None:
    """Replace the file atomically, durably. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o644), "w") as file:
            json.dump(data, file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
