"""`upbeat explain --model`: when a model's weights came to each device and left it lately, what of them it lends to KV,
and why, in words."""

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
    "lent": "{other} needed memory for KV",
    "calm": "nobody had lacked memory for a while",
    "slow": "its steps were too slow",
}
#: Reasons that move layers, one after another, but not the model.
_OF_LAYERS = ("lent", "calm", "slow")
#: By `contracts.residency.Never`.
_NEVER = {
    "off": "worker.remap is off",
    "no_image": "there is no image of its weights in host memory (worker.images_gib)",
    "sizes": "they differ in size",
    "cap": "worker.remap_cap is less than one of them",
    "pinned": "it is pinned",
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
        for text in (*_lends(node), *(_moved(move, node, data["id"]) for move in node["moves"])):
            yield from textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="    ")
        if not node["moves"]:
            yield "  its weights stay there: `sharing` does not move them, or it is the only model"


def _lends(node: Mapping[str, Any]) -> Iterator[str]:
    """What it may lend there, and why no more."""
    may = node.get("may_lend")
    if not may:
        return
    if may["never"]:
        yield f"lends no layers to KV: {_NEVER.get(str(may['never']), str(may['never']))}"
        return
    times = f"copying a layer takes {_time(may['transfer_s'])}, computing one {_time(may['layer_s'])}"
    if may["idle"] or may["computing"]:
        yield (
            f"may lend {may['idle']} of its {node['layers']} layers to KV while idle, {may['computing']} while it "
            f"computes: {times}"
        )
    else:
        yield f"lends no layers to KV: {times}, so steps would wait for copies"


def _moved(move: Mapping[str, Any], node: Mapping[str, Any], model: str) -> str:
    if move["why"] not in _OF_LAYERS:
        return f"{move['state']} {ago(move['ago_s'])}: {_why(move)}"
    lent = f"lends {move.get('layers_lent') or 'none'} of {node.get('layers') or '?'} layers"
    why = "it needed memory for KV itself" if move["why"] == "lent" and move["other"] == model else _why(move)
    series = f"; one after another in {_time(move['seconds'])}" if move["seconds"] else ""
    return f"{lent} {ago(move['ago_s'])}: {why}{series}"


def _why(move: Mapping[str, Any]) -> str:
    idle = f"no request had used it for {_time(move['seconds'])}" if move["seconds"] else "no request had used it"
    words = _WHY.get(str(move["why"]), str(move["why"]))
    return words.format(other=move["other"] or "another model", seconds=_time(move["seconds"]), idle=idle)


def _time(seconds: float) -> str:
    return (
        f"{seconds * 1000:.2g} ms"
        if seconds < 0.01
        else f"{seconds * 1000:.0f} ms"
        if seconds < 1
        else f"{seconds:.1f} s"
        if seconds < 120
        else f"{seconds / 60:.0f} min"
    )
