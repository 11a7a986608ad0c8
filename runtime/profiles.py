"""Where profiles (`contracts.profile`) lie, and which one holds for a process.

They lie beside the model when its folder can be written, else in DATA. A file's name is its subject's key, so that machines which share a
model's folder keep a profile each. What does not fit is refused: by a start that names a file itself (`worker.profile`), with an error; by
others, with a reason to log, and the worker learns as it runs.
"""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Iterator
from pathlib import Path

from contracts.errors import ConfigError
from contracts.profile import Profile, Subject, decode, encode, misfit
from runtime.config import Config

_PREFIX = "upbeat-profile-"


def processor() -> str:
    """The processor's name, as the system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0))


def folders(config: Config) -> list[Path]:
    """Where profiles of the configured model are looked for, in order."""
    return [config.model, config.data / "profiles"]


def store(profile: Profile, config: Config) -> Path:
    """Write the profile into the first folder that takes it, whole or not at all, and return its path. Raises ConfigError."""
    why = ""
    for folder in folders(config):
        path = folder / f"{_PREFIX}{profile.subject.key}.json"
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            draft.write_text(encode(profile))
            draft.replace(path)
        except OSError as e:
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)
            why = f"{folder}: {e.strerror}"
            continue
        return path
    raise ConfigError(f"no profile can be written ({why}); give a --data directory that can be, or --out FILE")


def read(path: Path) -> Profile:
    """The profile in a file. Raises ConfigError naming the file and the remedy."""
    try:
        return decode(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"{path} cannot be read as a profile: {e}; measure again with `upbeat profile`") from e


def stored(config: Config) -> Iterator[Path]:
    """The files of all profiles beside the model, and of all in DATA."""
    for folder in folders(config):
        yield from sorted(folder.glob(f"{_PREFIX}*.json"))


def fitting(config: Config, subject: Subject) -> tuple[Profile | None, str]:
    """The profile that holds for `subject` as `worker.profile` says, or None and why there is none.

    Raises ConfigError when `worker.profile` names a file that is missing, damaged, or of something else.
    """
    wish = config.worker.profile
    if wish == "off":
        return None, "worker.profile is off"
    if wish != "auto":
        profile = read(Path(wish))
        if why := misfit(profile, subject):
            raise ConfigError(
                f"worker.profile = {wish!r} does not hold here: {why}; measure with `upbeat profile`, or set worker.profile: auto"
            )
        return profile, ""
    for folder in folders(config):
        path = folder / f"{_PREFIX}{subject.key}.json"
        if path.exists():
            try:
                profile = read(path)
            except ConfigError as e:
                return None, str(e)
            why = misfit(profile, subject)
            return (None, f"{path} was renamed: {why}") if why else (profile, "")
    return None, "none was measured for this model on this machine; `upbeat profile` makes one"
