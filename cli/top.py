"""`upbeat top`: each node's KV activity, until Ctrl-C. The first screen has sums since the services started."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from cli.client import Gateway
from cli.core.traffic import Look, sample
from cli.fleet import GIB, MIB, counted, hbm_shares, no_sessions, session_table, size, table
from cli.models import memory_of, shared_devices

_SOURCES = ("ssd", "peer", "blob")
_FOUND = ("hbm", "dram", *_SOURCES)
_TIERS = ("ssd_read", "ssd_write", "blob_read", "blob_write")
_OUTCOMES = ("used", "late", "wasted")
_SESSIONS = 10
_GAP = 2


def watch(console: Console, gateway: Gateway, every_s: float, rounds: int) -> None:
    """Show the stack every `every_s` seconds, `rounds` times (0: until Ctrl-C). Raises CallFailed if the gateway stops
    answering."""
    screens = _screens(gateway, every_s, rounds, lambda: console.width)
    if rounds == 1 or not console.is_terminal:
        for screen in screens:
            console.print(screen)
        return
    with Live(console=console, auto_refresh=False, screen=not rounds) as live:
        for screen in screens:
            live.update(screen, refresh=True)


def records(gateway: Gateway, every_s: float, rounds: int) -> Iterator[dict[str, Any]]:
    """The same as data: `at_s` (seconds since the epoch), `url`, `fleet` with each node's samples, `sessions`. Raises
    CallFailed."""
    shown = 0
    while True:
        fleet = gateway.call("GET", "/v1/fleet?metrics=true")
        sessions = gateway.call("GET", f"/v1/sessions?limit={_SESSIONS}")["data"]
        yield {"at_s": round(time.time(), 3), "url": gateway.url, "fleet": fleet, "sessions": sessions}
        shown += 1
        if rounds and shown >= rounds:
            return
        time.sleep(every_s)


def _screens(gateway: Gateway, every_s: float, rounds: int, width: Callable[[], int]) -> Iterator[RenderableType]:
    before: dict[str, dict[str, float]] = {}
    at, first = 0.0, True
    for record in records(gateway, every_s, rounds):
        fleet, now = record["fleet"], time.monotonic()
        samples = {str(n["node"]): n.get("metrics", {}) for n in fleet["nodes"]}
        looks = {
            name: Look(own, before.get(name, {}), now - at if name in before else 0.0) for name, own in samples.items()
        }
        yield _screen(record, looks, width(), since_start=first)
        before, at, first = samples, now, False


def _screen(record: dict[str, Any], looks: dict[str, Look], width: int, *, since_start: bool) -> RenderableType:
    fleet, sessions = record["fleet"], record["sessions"]
    serving = sum(bool(node.get("serving")) for node in fleet["nodes"])
    head = Text(
        f"{time.strftime('%H:%M:%S')}  {record['url']}  {serving} of {fleet.get('expected_nodes', 0)} "
        f"{counted(fleet['nodes'])} serve, "
        f"{fleet.get('active_requests', 0)} requests\nsums "
        f"{'since the start' if since_start else 'since the last look'}"
    )
    nodes = {str(node["node"]): _rows(node, looks[str(node["node"])]) for node in fleet["nodes"]}
    return Group(
        head,
        Text(),
        *_blocks(nodes, width),
        Text(),
        *((models, Text()) if (models := shared_devices(fleet["nodes"])) is not None else ()),
        session_table(sessions, width) if sessions else Text(no_sessions(fleet)),
    )


def _blocks(nodes: dict[str, dict[str, str]], width: int) -> Iterator[RenderableType]:
    """A column a device; devices that do not fit go into further tables below."""
    labels = list(next(iter(nodes.values()), {}))
    room = width - max(map(len, labels), default=0) - _GAP
    waiting = list(nodes)
    while waiting:
        block: list[str] = []
        left = room
        while waiting:
            needs = _GAP + max(len(waiting[0]), *map(len, nodes[waiting[0]].values()))
            if block and needs > left:
                break
            left -= needs
            block.append(waiting.pop(0))
        rows = table("", *block, gap=_GAP)
        for label in labels:
            rows.add_row(label, *(nodes[name][label] for name in block))
        yield rows
        if waiting:
            yield Text()


def _rows(node: dict[str, Any], look: Look) -> dict[str, str]:
    """One device's column: value by label."""
    hits = look.shares(("upbeat_worker_hit_bytes_total", "upbeat_kvstore_hit_bytes_total"), "tier", _FOUND)
    waiting = {
        tier: look.now.get(sample("upbeat_kvstore_write_back_waiting_bytes", tier=tier), 0.0)
        for tier in ("ssd", "blob")
    }
    queued = {what: look.now.get(sample("upbeat_kvstore_queued", what=what), 0.0) for what in ("loads", *_SOURCES)}
    return {
        "state": str(node.get("state") or ("serving" if node.get("serving") else "not serving")),
        "requests running, waiting": f"{node.get('running', 0)}, {node.get('waiting', 0)}",
        "hints in flight": str(node.get("advised", 0)),
        "HBM in use by requests, cached": ", ".join(hbm_shares(node)),
        "device memory: weights, KV": memory_of(node, "weights", "kv"),
        "device memory: warm, free": memory_of(node, "warm", "free"),
        "DRAM used": f"{_gib(node, 'dram_bytes_used')} of {_gib(node, 'dram_bytes_total')} GiB",
        "SSD used": _used(look, "ssd") or size(int(node.get("ssd_bytes_used") or 0)),
        "blob used, by all nodes": _used(look, "blob") or "-",
        "disk free: SSD, blob": ", ".join(_free(look, tier) for tier in ("ssd", "blob")),
        "sessions here": str(node.get("sessions", 0)),
        "loads under way": f"{queued['loads']:.0f}",
        **{
            f"read from {t}": _flow(look.rate(sample("upbeat_kvstore_read_bytes_total", source=t)), queued[t])
            for t in _SOURCES
        },
        **{
            f"written to {t}": _flow(look.rate(sample("upbeat_kvstore_written_bytes_total", tier=t)), waiting[t], _mib)
            for t in waiting
        },
        "hits: " + "/".join(_FOUND): ", ".join(f"{share:.0%}" for share in hits.values()) if hits else "-",
        "chunks missed": f"{look.gained(sample('upbeat_kvstore_events_total', what='chunks_missed')):.0f}",
        "hints, DRAM: used/late/wasted": _sums(look, "upbeat_kvstore_hint_bytes_total", "outcome", _OUTCOMES),
        "hints, HBM: used/late/wasted": _sums(look, "upbeat_worker_hint_bytes_total", "outcome", _OUTCOMES),
        "evicted from HBM": _sums(look, "upbeat_worker_evicted_bytes_total", "tier", ("hbm",)),
        "evicted from DRAM, SSD": _sums(look, "upbeat_kvstore_evicted_bytes_total", "tier", ("dram", "ssd")),
        "tiers left alone": ", ".join(t for t in _TIERS if look.now.get(sample("upbeat_kvstore_tier_up", tier=t)) == 0)
        or "none",
        "bad checksums": f"{look.gained_in('upbeat_kvstore_checksum_failures_total'):.0f}",
    }


def _used(look: Look, tier: str) -> str:
    """A tier's use, and its limit if it has one; empty if the store has not reported it."""
    used, limit = (look.now.get(sample(f"upbeat_kvstore_{what}_bytes", tier=tier)) for what in ("used", "limit"))
    if used is None or not limit:
        return "" if used is None else size(used)
    return f"{used / GIB:.2f} of {limit / GIB:.2f} GiB" if used >= GIB else f"{size(used)} of {size(limit)}"


def _free(look: Look, tier: str) -> str:
    free = look.now.get(sample("upbeat_kvstore_disk_free_bytes", tier=tier), -1.0)
    return size(free) if free >= 0 else "-"


def _flow(rate: float, waiting: float, unit: Callable[[float], str] = "{:.0f}".format) -> str:
    return f"{rate / 1e6:.0f} MB/s" + (f", {unit(waiting)} wait" if waiting else "")


def _sums(look: Look, family: str, label: str, values: tuple[str, ...]) -> str:
    sizes = [look.gained_in(family, **{label: value}) for value in values]
    unit, name = (GIB, "GiB") if max(sizes) >= GIB else (MIB, "MiB")
    return ", ".join(f"{size / unit:.1f}" for size in sizes) + f" {name}"


def _gib(node: dict[str, Any], key: str) -> str:
    return f"{int(node.get(key) or 0) / GIB:.2f}"


def _mib(size: float) -> str:
    return f"{size / MIB:.1f} MiB"
