"""What the launcher prints: lines or JSON events, and a spinner on a terminal."""

from __future__ import annotations

import contextlib
import json
import shlex
from typing import Any

from rich.console import Console
from rich.status import Status

from cli.addresses import base_url, other_urls
from runtime.config import Config
from runtime.registry import registered


class Display:
    """Prints on stdout. A closed pipe does not stop the stack."""

    def __init__(self, console: Console | None = None, *, as_json: bool = False, own_key: str = "") -> None:
        """own_key: the key that this stack made, to show to its user; empty: none."""
        self._as_json, self._own_key = as_json, own_key
        self._console = console or Console(highlight=False, soft_wrap=True, markup=False)
        self._status: Status | None = None
        self._last_wait = ""

    def line(self, text: str, style: str = "") -> None:
        """Print one or more lines."""
        if self._as_json:
            self._event("message", text=text)
            return
        with contextlib.suppress(OSError):
            self._console.print(text, style=style or None)

    def wait(self, text: str) -> None:
        """Show what is being waited for (a spinner on a terminal, else a line per change); empty: nothing."""
        if text == self._last_wait:
            return
        self._last_wait = text
        if self._as_json:
            if text:
                self._event("waiting", text=text)
            return
        with contextlib.suppress(OSError):
            if self._console.is_terminal:
                if self._status is not None:
                    self._status.stop()
                    self._status = None
                if text:
                    self._status = self._console.status(text)
                    self._status.start()
            elif text:
                self._console.print(text)

    def serving(self, config: Config, took_s: float) -> None:
        """Announce that the stack serves for the first time."""
        if not self._as_json:
            self.line(welcome(config, took_s, self._own_key), "green")
            return
        places: dict[str, Any] = {"url": base_url(config), "logs": str(config.run_dir / "logs")} | (
            {"api_key": self._own_key} if self._own_key else {}
        )
        places |= {"other_urls": others} if (others := other_urls(config)) else {}
        names = list(registered(config))
        self._event(
            "serving",
            **places,
            model=config.served_model,
            models=names,
            nodes=config.nodes.count,
            devices=config.devices,
            took_s=round(took_s, 3),
        )

    def _event(self, event: str, **fields: Any) -> None:
        with contextlib.suppress(OSError):
            print(json.dumps({"event": event, **fields}), flush=True)


def welcome(config: Config, took_s: float, own_key: str = "") -> str:
    """The text for a stack that serves: URLs, logs, its own key if it has one, and a command to try."""
    url = base_url(config)
    question = {"role": "user", "content": "My name is Ada. What is my name?"}
    body = json.dumps({"model": config.served_model, "messages": [question]})
    key = f' -H "authorization: Bearer {own_key or "$UPBEAT_API_KEY"}"' if config.gateway.api_keys else ""
    own = (
        f"  key    export UPBEAT_API_KEY={own_key}   (this stack's own, kept in {config.data}/api_key)\n"
        if own_key
        else ""
    )
    others = "".join(f"  or     {other}/   (from other machines)\n" for other in other_urls(config))
    nodes = f"{config.nodes.count} node" + ("s" if config.nodes.count > 1 else "")
    nodes += f" of {config.nodes.devices} devices" if config.nodes.devices > 1 else ""
    return (
        f"\nUpbeat serves {' and '.join(registered(config))} on {url} ({nodes}, ready in {took_s:.1f} s)\n\n"
        f"  open   {url}/   (the API: {url}/docs)\n"
        f"{others}"
        f"  logs   {config.run_dir}/logs\n"
        f"{own}"
        f"  try    curl {url}/v1/chat/completions{key} -H 'content-type: application/json' -d {shlex.quote(body)}\n"
        f"  stop   Ctrl-C\n"
    )
