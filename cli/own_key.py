"""The key of a stack that listens beyond loopback and was given none: made by its first `upbeat up`, the same at each later one."""

from __future__ import annotations

import os
import re
from pathlib import Path

from contracts.api_keys import KEY_BYTES, new_key
from contracts.errors import ConfigError
from runtime.config import Config
from runtime.kept import kept

_KEY = re.compile(r"upb-[A-Za-z0-9_-]{43}")


def path_of(data: Path) -> Path:
    """Where it is kept."""
    return data / "api_key"


def fresh_key() -> str:
    """A new one, kept nowhere."""
    return new_key(os.urandom(KEY_BYTES))


def kept_key(data: Path) -> str:
    """The stack's own key, from DATA/api_key; made on first use, readable by its owner only. Raises ConfigError."""
    path = path_of(data)
    try:
        key = kept(path, fresh_key)
    except (OSError, ValueError) as e:
        raise ConfigError(f"{path} cannot be kept or read ({e}); mend that, or configure gateway.api_keys") from None
    if not _KEY.fullmatch(key):
        raise ConfigError(f"{path} holds no key of this stack; delete it to get a new one, or configure gateway.api_keys")
    return key


def own_key_of(config: Config) -> str:
    """The stack's own key where it is the one that is asked for; empty: it has others, or none."""
    keys = [entry.key for entry in config.gateway.api_keys]
    return keys[0] if len(keys) == 1 and path_of(config.data).exists() and keys[0] == kept_key(config.data) else ""
