"""Completion in shells: the script to source, and the session ids that a running gateway knows."""

from __future__ import annotations

import os

from typer.completion import completion_init, get_completion_script  # type: ignore[attr-defined]

from cli.client import CallFailed, Gateway
from contracts.errors import ConfigError

__all__ = ["COMPLETE", "completion_init", "known_sessions", "script"]
#: The variable with which a shell asks this program for completions.
COMPLETE = "_UPBEAT_COMPLETE"
SHELLS = ("bash", "zsh", "fish")
_MOST = 200
#: Nobody waits longer for a completion.
_TIMEOUT_S = 1.0


def script(shell: str) -> str:
    """What the shell is to source. Raises ConfigError for a shell that is not known."""
    if shell not in SHELLS:
        raise ConfigError(f"no completion for {shell!r}; give one of {', '.join(SHELLS)}")
    return get_completion_script(prog_name="upbeat", complete_var=COMPLETE, shell=shell)


def known_sessions(incomplete: str) -> list[str]:
    """Ids of the latest sessions of the gateway that UPBEAT_URL names (or the usual one) that begin so; none when it does not answer."""
    gateway = Gateway(os.environ.get("UPBEAT_URL", "http://127.0.0.1:8080"), os.environ.get("UPBEAT_API_KEY"), _TIMEOUT_S)
    try:
        found = gateway.call("GET", f"/v1/sessions?limit={_MOST}")["data"]
    except (CallFailed, ConfigError, KeyError):
        return []
    return [s["id"] for s in found if s["id"].startswith(incomplete)]
