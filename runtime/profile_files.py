"""Where profiles (`contracts.latency_profile`) are kept, and which one is valid for a process.

They are beside the model if its folder is writable, else in DATA. The file's name contains the subject's key, so
machines that share a model's folder keep one profile each. A profile that does not match is an error if
`worker.profile` names the file; else the reason is logged and the worker measures and learns as it runs.
"""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Iterator
from pathlib import Path

from contracts.errors import ConfigError
from contracts.latency_profile import Profile, Subject, decode, encode, misfit
from runtime.config import Config

_PREFIX = "upbeat-profile-"


def processor() -> str:
    """The processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()


def cores() -> int:
    """Number of cores this process may use."""
    return len(os.sched_getaffinity(0))


def folders(config: Config) -> list[Path]:
    """Folders searched for profiles of the configured model, in order."""
    return [config.model, config.data / "profiles"]


def store(profile: Profile, config: Config) -> Path:
    """Writes the profile atomically into the first writable folder and returns its path. Raises ConfigError."""
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
    """All profile files beside the model and in DATA."""
    for folder in folders(config):
        yield from sorted(folder.glob(f"{_PREFIX}*.json"))


def fitting(config: Config, subject: Subject) -> tuple[Profile | None, str]:
    """The profile for `subject` according to `worker.profile`, or None and the reason.

    Raises ConfigError when `worker.profile` names a file that is missing, damaged, or for another subject.
    """
    asked = config.worker.profile
    if asked == "off":
        return None, "worker.profile is off"
    if asked != "auto":
        profile = read(Path(asked))
        if why := misfit(profile, subject):
            raise ConfigError(
                f"worker.profile = {asked!r} does not hold here: {why}; measure with `upbeat profile`, or set "
                "worker.profile: auto"
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
