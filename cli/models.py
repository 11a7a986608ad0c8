"""The models that `upbeat up` was asked for: by flags over those of the file, and which node serves which where nobody says.

And `upbeat models`: what a running stack has registered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from cli.fleet import size, table
from contracts.errors import ConfigError
from runtime.config import Config
from runtime.registry import RegisteredModel


def asked_models(texts: Sequence[str] | None) -> tuple[str | None, dict[str, str]]:
    """What `--model`, given so often, asks for: one directory or hub id, or some by their names in the API. Raises ConfigError."""
    named: dict[str, str] = {}
    plain: list[str] = []
    for text in texts or ():
        name, equals, path = text.partition("=")
        if not equals or Path(text).exists():
            plain.append(text)
        elif not name or not path:
            raise ConfigError(f"--model {text} names no model; give NAME=DIR, such as --model small=models/demo")
        elif name in named:
            raise ConfigError(f"--model {text}: {name} is named twice; give each model its own name")
        else:
            named[name] = path
    if len(plain) + bool(named) > 1:
        raise ConfigError(f"--model {plain[-1]} is one of several; name each of them, such as --model small=DIR --model large=DIR")
    return (plain[0] if plain else None), named


def models_over(named: Mapping[str, str], said: Config, nodes: int) -> dict[str, Any]:
    """`models` for a stack of so many nodes: those that flags name, each with what the file says of it, else the file's. As many models as
    nodes, of which there are several, and nobody says which: one each, in order. Else all on all nodes that none is said for."""
    entries = {name: model.model_dump() for name, model in said.models.items()}
    if named:
        entries = {name: entries.get(name, {}) | {"path": path} for name, path in named.items()}
    if len(entries) == nodes > 1 and not any(entry.get("nodes") for entry in entries.values()):
        for number, entry in enumerate(entries.values()):
            entry["nodes"] = [number]
    return entries


def flag_of(name: str, model: RegisteredModel, named: Mapping[str, str]) -> str:
    """What names a model's path in an error."""
    return f"--model {name}:" if name in named else f"models.{name}.path ="


def show_models(console: Console, models: Sequence[Mapping[str, Any]]) -> None:
    """A line a model, of what `GET /v1/models` says."""
    rows = table("model", "state", "nodes", "weights, of the device", "KV in use", "KV cached", "TTFT", "TPOT")
    for model in models:
        nodes = model.get("nodes") or []
        used, cached, limit = (sum(int(node.get(f"kv_bytes_{what}") or 0) for node in nodes) for what in ("used", "cached", "limit"))
        rows.add_row(
            str(model.get("id", "?")),
            str(model.get("state") or "?"),
            ", ".join(f"{node.get('node', '?')} ({node.get('state', '?')})" for node in nodes) or "-",
            size(int(model["weight_bytes"])) if model.get("weight_bytes") else "-",
            f"{size(used)} of {size(limit)}" if limit else "-",
            size(cached) if limit else "-",
            _promised(model, "ttft_slo_s"),
            _promised(model, "tpot_slo_s"),
        )
    console.print(rows)


def _promised(model: Mapping[str, Any], key: str) -> str:
    seconds = float(model.get(key) or 0)
    return f"{seconds:g} s" if seconds else "-"
