"""Shell completion: the script to source, and session ids from a running gateway."""

from __future__ import annotations

import os

from typer.completion import completion_init, get_completion_script  # type: ignore[attr-defined]

from cli.client import CallFailed, Gateway
from contracts.errors import ConfigError

__all__ = ["COMPLETE", "completion_init", "known_sessions", "script"]
#: The variable with which a shell asks this program for completions.
COMPLETE = "_UPBEAT_COMPLETE"
SHELLS = ("bash", "zsh", "fish")
_MAX_SESSIONS = 200
_TIMEOUT_S = 1.0


def script(shell: str) -> str:
    """The script for `shell` to source. Raises ConfigError for an unknown shell."""
    if shell not in SHELLS:
        raise ConfigError(f"no completion for {shell!r}; give one of {', '.join(SHELLS)}")
    return get_completion_script(prog_name="upbeat", complete_var=COMPLETE, shell=shell)


def known_sessions(incomplete: str) -> list[str]:
    """Ids of recent sessions that start with `incomplete`, from the gateway at UPBEAT_URL (or the default URL).

    Empty if the gateway does not answer.
    """
    gateway = Gateway(
        os.environ.get("UPBEAT_URL", "http://127.0.0.1:8080"), os.environ.get("UPBEAT_API_KEY"), _TIMEOUT_S
    )
    try:
        found = gateway.call("GET", f"/v1/sessions?limit={_MAX_SESSIONS}")["data"]
    except (CallFailed, ConfigError, KeyError):
        return []
    return [s["id"] for s in found if s["id"].startswith(incomplete)]
