"""`upbeat explain --model`: when a model's weights came to each device and left it lately, and why, in words."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from cli.explain import WIDTH, ago

#: By `contracts.residency.Why`. {other}: the model that asked; {seconds}: see there.
_WHY = {
    "start": "the worker started",
    "request": "a request waited for it",
    "hint": "a hint said that a request comes",
    "loaded": "its weights were there after {seconds}",
    "slice": "all models were busy, its slice was over, and {other} waited",
    "group": "its group of requests was served, and {other} waited",
    "starved": "its requests found no memory, and {other} waited",
    "drained": "it gave way: its sequences were taken off the device, their KV is kept",
    "for_weights": "{idle}, and {other} needed memory for its weights",
    "for_kv": "{idle}, and {other} needed memory for KV",
    "unused": "{idle}, which is longer than loading it takes",
    "failed": "its weights could not be read or placed; it is tried again",
}


def lines(data: Mapping[str, Any]) -> Iterator[str]:
    """Lines of at most 80 columns for an answer of `GET /v1/models/{model}/placement`."""
    if not data["nodes"]:
        yield f"{data['id']}: no worker that is here has it"
        return
    yield from textwrap.wrap(f"{data['id']}: what happened to its weights lately, the latest first", WIDTH)
    for node in data["nodes"]:
        yield ""
        yield f"{node['node']}: {node['state']}"
        for move in node["moves"]:
            text = f"{move['state']} {ago(move['ago_s'])}: {_why(move)}"
            yield from textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="    ")
        if not node["moves"]:
            yield "  its weights stay there: `sharing` does not move them, or it is the only model"


def _why(move: Mapping[str, Any]) -> str:
    idle = f"no request had used it for {_time(move['seconds'])}" if move["seconds"] else "no request had used it"
    words = _WHY.get(str(move["why"]), str(move["why"]))
    return words.format(other=move["other"] or "another model", seconds=_time(move["seconds"]), idle=idle)


def _time(seconds: float) -> str:
    return (
        f"{seconds * 1000:.0f} ms"
        if seconds < 1
        else f"{seconds:.1f} s"
        if seconds < 120
        else f"{seconds / 60:.0f} min"
    )
