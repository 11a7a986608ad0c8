"""A stack's own API key: made when it listens beyond loopback without configured keys, and kept for later starts."""

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
    """The file that keeps the key."""
    return data / "api_key"


def fresh_key() -> str:
    """A new key, not stored."""
    return new_key(os.urandom(KEY_BYTES))


def kept_key(data: Path) -> str:
    """The key in DATA/api_key, made on first use with mode 0600. Raises ConfigError."""
    path = path_of(data)
    try:
        key = kept(path, fresh_key)
    except (OSError, ValueError) as e:
        raise ConfigError(f"{path} cannot be kept or read ({e}); mend that, or configure gateway.api_keys") from None
    if not _KEY.fullmatch(key):
        raise ConfigError(
            f"{path} holds no key of this stack; delete it to get a new one, or configure gateway.api_keys"
        )
    return key


def own_key_of(config: Config) -> str:
    """The stack's own key if it is the only configured one; else empty."""
    keys = [entry.key for entry in config.gateway.api_keys]
    return keys[0] if len(keys) == 1 and path_of(config.data).exists() and keys[0] == kept_key(config.data) else ""
