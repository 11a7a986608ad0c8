"""Reads the configuration: YAML plus `UPBEAT__SECTION__KEY`. Errors name every wrong value and its remedy.

Precedence: environment over file over default. All processes read the same file. The command line gives a process its
node's number, and a worker its device's; addresses and paths follow from these (runtime/places.py).
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_settings import EnvSettingsSource

from contracts.api_keys import hashed, is_hashed
from contracts.errors import ConfigError
from runtime.config import Config
from runtime.config_checks import check
from runtime.kept import kept

#: Settings whose values no message shows.
_SECRET = re.compile(r"\.(key|api_key|token_secret)$|\.blob_options\b")


def load_config(
    file: Path | None = None, overrides: dict[str, Any] | None = None, secrets: Path | None = None
) -> Config:
    """The configuration from `file` (YAML), `UPBEAT__*` and `overrides` (highest, nested like the file). secrets: a
    second file, for settings that not every process may read; it precedes the first one.

    Raises ConfigError naming key, value and remedy; the service then does not start.
    """
    return changed(said_config(file, secrets), overrides or {})


def said_config(file: Path | None = None, secrets: Path | None = None) -> Config:
    """The configuration from the files and `UPBEAT__*`, without checks across sections. Raises ConfigError."""
    try:
        return Config(**_merge(_content(file), _content(secrets, "--secrets")))
    except ValidationError as e:
        raise ConfigError(_explain(e)) from e


def says(file: Path | None, section: str, key: str) -> bool:
    """Whether `file` or the environment sets this key of a section, even to its default. Raises ConfigError.

    `model_fields_set` of a section does not tell: it has all fields once one differs from its default, else none.
    """
    return any(key in (values.get(section) or {}) for values in (_content(file), EnvSettingsSource(Config)()))


def _content(file: Path | None, flag: str = "--config") -> dict[str, Any]:
    """The file's mapping. Raises ConfigError."""
    if file is None:
        return {}
    try:
        data = yaml.safe_load(file.read_text()) or {}
    except OSError as e:
        raise ConfigError(f"{flag} {file}: {e.strerror}; give a readable YAML file") from e
    except yaml.YAMLError as e:
        raise ConfigError(f"{flag} {file} is not YAML: {e}") from e
    if not isinstance(data, dict):
        raise ConfigError(f"{flag} {file} must hold a mapping of sections, such as `kv: {{hbm_gib: 1}}`")
    return data


def changed(config: Config, overrides: dict[str, Any]) -> Config:
    """`config` with some keys replaced, nested like the file. Raises ConfigError as `load_config` does."""
    base = config.model_dump()
    if "models" in overrides:  # they replace `model` and `model_name`
        base = {key: value for key, value in base.items() if key not in ("model", "model_name")}
    try:
        config = Config.model_validate(_merge(base, overrides)) if overrides else config
    except ValidationError as e:
        raise ConfigError(_explain(e)) from e
    check(config)
    return config


def with_hashed_keys(config: Config) -> Config:
    """`config` for writing to disk: API keys given in full are hashed, unless they are too short."""
    keys = [key.model_dump() | {"key": _hashed(key.key)} for key in config.gateway.api_keys]
    return changed(config, {"gateway": {"api_keys": keys}})


def _hashed(configured: str) -> str:
    with contextlib.suppress(ValueError):
        return configured if is_hashed(configured) else hashed(configured)
    return configured


def dump_config(config: Config) -> str:
    """The configuration as YAML; `load_config` is the inverse."""
    text: str = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)
    return text


def secret_file(data: Path) -> Path:
    """Where the cluster secret is kept."""
    return data / "secret"


def cluster_secret(data: Path) -> bytes:
    """The cluster secret, 32 bytes, from DATA/secret; made on first use, readable by its owner only."""
    path = secret_file(data)
    try:
        secret = bytes.fromhex(kept(path, lambda: os.urandom(32).hex()))
    except ValueError:
        secret = b""
    if len(secret) != 32:
        raise ConfigError(f"{path} must hold 64 hexadecimal digits; restore it, or delete DATA to start over")
    return secret


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Merges nested mappings, except `models`, which is replaced as a whole."""
    merged = dict(base)
    for key, value in over.items():
        nested = isinstance(value, dict) and isinstance(merged.get(key), dict) and key != "models"
        merged[key] = _merge(merged[key], value) if nested else value
    return merged


def _explain(error: ValidationError) -> str:
    lines = []
    for item in error.errors():
        key = ".".join(str(part) for part in item["loc"])
        remedy = "remove it or correct its spelling" if item["type"] == "extra_forbidden" else item["msg"]
        value = "(not shown)" if _SECRET.search(key) else repr(item["input"])
        lines.append(f"{key} = {value}: {remedy} (in YAML, or UPBEAT__{key.upper().replace('.', '__')})")
    return "wrong configuration:\n  " + "\n  ".join(lines)
