"""The models of a stack: `--model` flags over the configuration file, and the default nodes of each.

Also the tables of `upbeat models` and of models in `upbeat top`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

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
    """Print a line a model, then one an adapter. models: `data` of `GET /v1/models`."""
    shown = [model for model in models if not model.get("parent")]
    beside = [model for model in models if model.get("parent")]
    rows = table("model", "state", "nodes", "weights", "KV in use", "KV cached", "idle", "priority", "TTFT, TPOT")
    for model in shown:
        nodes = model.get("nodes") or []
        used, cached, limit = (
            sum(int(node.get(f"kv_bytes_{what}") or 0) for node in nodes) for what in ("used", "cached", "limit")
        )
        rows.add_row(
            str(model.get("id", "?")),
            str(model.get("state") or "?"),
            ", ".join(f"{node.get('node', '?')} ({node.get('state', '?')}{_lent(node, model)})" for node in nodes)
            or "-",
            size(int(model["weight_bytes"])) if model.get("weight_bytes") else "-",
            f"{size(used)} of {size(limit)}" if limit else "-",
            size(cached) if limit else "-",
            idle(min((float(node.get("idle_s") or 0) for node in nodes), default=None)),
            str(model.get("priority") or 0) + (", pinned" if model.get("pinned") else ""),
            _objectives(model),
        )
    console.print(rows)
    if beside:
        adapters = table("adapter", "of", "state")
        for model in beside:
            adapters.add_row(*(str(model.get(key) or "?") for key in ("id", "parent", "state")))
        console.print(adapters)


def shared_devices(devices: Sequence[Mapping[str, Any]]) -> Table | None:
    """A row for each model of devices that several models share, or whose model lends layers; None: there are no such
    devices. devices: `nodes` of `GET /v1/fleet`."""
    rows = table("device", "model", "state", "run, wait", "weights", "KV", "idle")
    for device in devices:
        held = {(share.get("use"), share.get("name")): int(share.get("bytes") or 0) for share in _memory(device)}
        models = device.get("models") or []
        shown = len(models) > 1 or any(model.get("layers_lent") for model in models)
        for number, model in enumerate(models if shown else ()):
            name = str(model.get("name", "?"))
            rows.add_row(
                "" if number else str(device.get("node", "?")),
                name,
                _state(model),
                f"{model.get('running') or 0}, {model.get('waiting') or 0}",
                (size(held["weights", name]) if ("weights", name) in held else "-") + _lent(model, model),
                size(held["kv", name]) if ("kv", name) in held else "-",
                idle(float(model.get("idle_s") or 0)),
            )
    return rows if rows.row_count else None


def memory_of(device: Mapping[str, Any], *uses: str) -> str:
    """Memory of a device by use, such as "5.0 MiB, 1.0 MiB"; "-": its worker does not say."""
    if not _memory(device):
        return "-"
    by_use: Counter[str] = Counter()
    for share in _memory(device):
        by_use[str(share.get("use"))] += int(share.get("bytes") or 0)
    return ", ".join(size(by_use[use]) for use in uses)


def _memory(device: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return device.get("memory") or []


def _lent(there: Mapping[str, Any], model: Mapping[str, Any]) -> str:
    """How many of its layers a model lends there; empty: none."""
    lent = int(there.get("layers_lent") or 0)
    return f", {lent} of {model.get('layers') or '?'} lent" if lent else ""


def _state(model: Mapping[str, Any]) -> str:
    left_s = float(model.get("activation_s") or 0)
    state = str(model.get("state") or "?")
    return f"{state}, {left_s:.1f} s left" if state == "loading" and left_s else state


def idle(seconds: float | None) -> str:
    """How long a model has had no request, in words; None: not known."""
    if seconds is None:
        return "-"
    return "busy" if seconds <= 0 else f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _objectives(model: Mapping[str, Any]) -> str:
    """Targets, and how many of its answers kept to each."""
    told = {target: float(model.get(f"{target}_slo_s") or 0) for target in ("ttft", "tpot")}
    if not any(told.values()):
        return "-"
    counts = model.get("slo_turns") or {}
    return ", ".join(f"{most_s:g} s{_kept(counts.get(of) or {})}" if most_s else "-" for of, most_s in told.items())


def _kept(count: Mapping[str, Any]) -> str:
    turns = int(count.get("turns") or 0)
    return f" ({100 * int(count.get('attained') or 0) / turns:.0f} %)" if turns else ""
