"""The models of a stack: `--model` flags over the configuration file, and the default nodes of each.

Also the table of `upbeat models`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from cli.fleet import size, table
from contracts.errors import ConfigError
from runtime.config import Config
from runtime.registered_model import RegisteredModel


def asked_models(texts: Sequence[str] | None) -> tuple[str | None, dict[str, str]]:
    """The values of `--model` as (one directory or hub id, or None; several by API name). Raises ConfigError."""
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
        raise ConfigError(
            f"--model {plain[-1]} is one of several; name each of them, such as --model small=DIR --model large=DIR"
        )
    return (plain[0] if plain else None), named


def models_over(named: Mapping[str, str], said: Config, nodes: int) -> dict[str, Any]:
    """The section `models` for a stack of `nodes` nodes: the models in flags, with the file's other keys for the same
    names; without flags, the file's models. If no entry has `nodes` and there are as many models as nodes (two or
    more), each node gets one, in order."""
    entries = {name: model.model_dump() for name, model in said.models.items()}
    if named:
        entries = {name: entries.get(name, {}) | {"path": path} for name, path in named.items()}
    if len(entries) == nodes > 1 and not any(entry.get("nodes") for entry in entries.values()):
        for number, entry in enumerate(entries.values()):
            entry["nodes"] = [number]
    return entries


def flag_of(name: str, model: RegisteredModel, named: Mapping[str, str]) -> str:
    """How an error names the source of a model's path."""
    return f"--model {name}:" if name in named else f"models.{name}.path ="


def show_models(console: Console, models: Sequence[Mapping[str, Any]]) -> None:
    """Print a line a model. models: `data` of `GET /v1/models`."""
    rows = table("model", "state", "nodes", "weights, of the device", "KV in use", "KV cached", "TTFT", "TPOT")
    for model in models:
        nodes = model.get("nodes") or []
        used, cached, limit = (
            sum(int(node.get(f"kv_bytes_{what}") or 0) for node in nodes) for what in ("used", "cached", "limit")
        )
        rows.add_row(
            str(model.get("id", "?")),
            str(model.get("state") or "?"),
            ", ".join(f"{node.get('node', '?')} ({node.get('state', '?')})" for node in nodes) or "-",
            size(int(model["weight_bytes"])) if model.get("weight_bytes") else "-",
            f"{size(used)} of {size(limit)}" if limit else "-",
            size(cached) if limit else "-",
            _objective(model, "ttft_slo_s"),
            _objective(model, "tpot_slo_s"),
        )
    console.print(rows)


def _objective(model: Mapping[str, Any], key: str) -> str:
    seconds = float(model.get(key) or 0)
    return f"{seconds:g} s" if seconds else "-"
