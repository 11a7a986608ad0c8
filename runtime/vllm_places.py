"""The private directory of a device's vLLM server: its sockets, its key, the record of its processes.

Whoever can reach the server's socket reads every tenant's sessions, so only this user may enter the directory.
"""

from __future__ import annotations

import os
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path

from contracts.errors import ConfigError
from runtime.config import Config

#: The kernel's limit of a socket's path, without the terminating zero.
_LONGEST_SOCKET = 107


@dataclass(frozen=True, slots=True)
class VllmPlaces:
    """socket: where the server answers HTTP. key: the file of its API key. wake: the socket on which the sidecar hears
    that an idle engine must step. record: which processes the server has."""

    directory: Path
    socket: Path
    key: Path
    wake: Path
    record: Path


def vllm_places(config: Config, node: int, device: int = 0) -> VllmPlaces:
    """The places of a device's server. Raises ConfigError when `run_dir` is too long for sockets."""
    directory = config.run_dir / (f"vllm-{node}-{device}" if config.nodes.devices > 1 else f"vllm-{node}")
    places = VllmPlaces(
        directory, directory / "http.sock", directory / "key", directory / "wake.sock", directory / "processes.json"
    )
    over = max(len(os.fsencode(path)) for path in (places.socket, places.wake)) - _LONGEST_SOCKET
    if over > 0:
        raise ConfigError(
            f"run_dir = {str(config.run_dir)!r} is {over} characters too long: the path of a socket in it may have "
            f"{_LONGEST_SOCKET}; give a shorter run_dir (--run-dir)"
        )
    return places


def server_url(config: Config, node: int, device: int) -> str:
    """Where the device's server is if something else starts it; empty: it is started here."""
    return config.vllm.server.replace("{n}", str(node)).replace("{d}", str(device))


def new_key() -> str:
    """An API key for a server of ours."""
    return secrets.token_hex(32)


def missing_python(python: Path) -> str:
    """What to do about an environment without vLLM."""
    return (
        f"vllm.python = {str(python)!r} is not there; run `make vllm` in the checkout, or set vllm.python to the "
        "interpreter of an environment with vLLM 0.32 or 0.33 and the package upbeat-vllm"
    )


def make_private(directory: Path) -> Path:
    """Make `directory`, or take one of this user's, so that no other user may enter it. Returns it.

    Raises ConfigError when it is a link, or another user's.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    directory.mkdir(mode=0o700, exist_ok=True)
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise ConfigError(
            f"{directory} is not a directory of this user; remove it, or give another run_dir (--run-dir)"
        )
    if stat.S_IMODE(found.st_mode) != 0o700:
        directory.chmod(0o700)
    return directory
