"""Tables of a running stack: the fleet, sessions, and where their KV is."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table

GIB = 1 << 30
MIB = 1 << 20
#: Below this width, headings are short and values equal in all rows are printed once.
WIDE = 120


def show_fleet(console: Console, all_serve: bool, fleet: dict[str, Any]) -> None:
    """Print a line of state, then a line a device. all_serve: /ready?all=1 is 200."""
    nodes = fleet.get("nodes", [])
    serving = sum(bool(node.get("serving")) for node in nodes)
    expected = int(fleet.get("expected_nodes", len(nodes)))
    missing = "; ".join(map(str, fleet.get("missing", [])))
    state = "ready" if all_serve else "partly ready" if fleet.get("ready") else "not ready"
    console.print(f"{state}: {serving} of {expected} {counted(nodes)} serve{missing and ' (' + missing + ')'}")
    schedulers = fleet.get("schedulers", [])
    if len(schedulers) > 1:
        told = (
            f"{s.get('address')} {s.get('state')} ({_int(s, 'nodes')} nodes, {_int(s, 'advised')} hints)"
            for s in schedulers
        )
        console.print(f"{len(schedulers)} schedulers: {'; '.join(told)}")
    models = [", ".join(str(model.get("name", "?")) for model in node.get("models", [])) or "-" for node in nodes]
    if console.width >= WIDE:
        rows = table(
            "node",
            "state",
            "model",
            "running",
            "waiting",
            "tokens due",
            "hints",
            "HBM in use",
            "HBM cached",
            "DRAM used",
            "SSD",
            "sessions",
        )
    else:
        console.print(
            f"models: {', '.join(sorted(set(models) - {'-'})) or 'none'}; HBM: in use by requests + cached; DRAM, "
            "SSD in GiB"
        )
        rows = table("node", "state", "run", "wait", "due", "hints", "HBM", "DRAM", "SSD", "sessions", gap=1)
    for number, (node, model) in enumerate(zip(nodes, models, strict=True)):
        again = (
            number > 0 and node.get("on_node") is not None and node.get("on_node") == nodes[number - 1].get("on_node")
        )
        cells = _fleet_cells(node, model, again)
        if console.width < WIDE:
            hbm = "+".join(cells[7:9]).replace("%+", "+").replace("-+-", "-")
            cells = [*cells[:2], *cells[3:7], hbm, *(c.replace(" of ", "/").removesuffix(" GiB") for c in cells[9:])]
        rows.add_row(*cells)
    console.print(rows)


def counted(nodes: list[dict[str, Any]]) -> str:
    """The plural noun for entries of a fleet: devices, or nodes if each has one device."""
    return "devices" if any("/" in str(node.get("node")) for node in nodes) else "nodes"


def _fleet_cells(node: dict[str, Any], model: str, again: bool) -> list[str]:
    """again: the row before is another device of the same node, so DRAM, SSD and sessions stay empty."""
    return [
        str(node.get("node", "?")),
        str(node.get("state") or ("serving" if node.get("serving") else "not serving")),
        model,
        str(_int(node, "running")),
        str(_int(node, "waiting")),
        f"{float(node.get('outstanding_tokens', 0)):.0f}",
        str(_int(node, "advised")),
        *hbm_shares(node),
        *(("", "", "") if again else _below(node)),
    ]


def _below(node: dict[str, Any]) -> tuple[str, str, str]:
    return (
        f"{_int(node, 'dram_bytes_used') / GIB:.2f} of {_int(node, 'dram_bytes_total') / GIB:.2f} GiB",
        size(_int(node, "ssd_bytes_used")),
        str(_int(node, "sessions")),
    )


def hbm_shares(node: dict[str, Any]) -> tuple[str, str]:
    """Shares of HBM beside weights: in use by requests, and holding cache that may be evicted."""
    if memory := node.get("memory"):  # models that share a device count the same free pages
        total = sum(_int(share, "bytes") for share in memory if share.get("use") in ("kv", "warm", "free"))
        used, cached = (
            sum(_int(model, f"kv_bytes_{what}") for model in node.get("models", [])) for what in ("used", "cached")
        )
        return (f"{used / total:.0%}", f"{cached / total:.0%}") if total else ("-", "-")
    total, free, cached = (_int(node, f"hbm_pages_{what}") for what in ("total", "free", "cached"))
    return (f"{(total - free) / total:.0%}", f"{cached / total:.0%}") if total else ("-", "-")


def size(bytes_: float) -> str:
    """`bytes_` in GiB, or in MiB below 1 GiB."""
    return f"{bytes_ / GIB:.2f} GiB" if bytes_ >= GIB else f"{bytes_ / MIB:.1f} MiB"


def no_sessions(fleet: dict[str, Any]) -> str:
    """The text for an empty list of sessions: it explains that short conversations are not listed."""
    sizes = sorted(
        {_int(model, "chunk_tokens") for node in fleet.get("nodes", []) for model in node.get("models", [])} - {0}
    )
    here = f", {' or '.join(map(str, sizes))} here" if sizes else ""
    return (
        "no sessions yet: one is listed when it has a whole chunk of tokens in the cache\n"
        f"(kv.chunk_tokens{here}); a shorter conversation keeps nothing"
    )


def show_sessions(console: Console, page: dict[str, Any], ask_fleet: Callable[[], Any], *, last: bool) -> None:
    """Print a line a session, in the given order.

    ask_fleet: called if there are none. last: all pages are being shown, so do not point to --all.
    """
    console.print(session_table(page["data"], console.width) if page["data"] else no_sessions(ask_fleet()))
    if page.get("has_more") and not last:
        console.print("there are more: --limit N, or --all")


def session_table(sessions: list[dict[str, Any]], width: int) -> Table:
    """A row a session; a narrow table omits the model if all have the same."""
    short = width < WIDE and len({s.get("model") for s in sessions}) == 1
    rows = table("session", *(() if short else ("model",)), "tokens", "last use", "held by", "next turn on")
    for s in sessions:
        rows.add_row(
            str(s["id"]),
            *(() if short else (str(s.get("model", "")),)),
            str(_int(s, "tokens")),
            _ago(s),
            ", ".join(map(str, s.get("held_by", []))) or "-",
            str(s.get("node") or "-"),
        )
    return rows


def show_session(console: Console, session: dict[str, Any]) -> None:
    """Print one session: a line a node and tier; for one being erased, what each node still has."""
    if session.get("status") == "erasing":
        console.print(f"{session['id']} is being erased; nothing of it is served")
        rows = table("node", "confirmed", "chunks left")
        for node in session.get("nodes", []):
            left = ", ".join(f"{tier} {chunks}" for tier, chunks in node.get("left", {}).items())
            rows.add_row(
                str(node.get("node", "?")),
                "yes" if node.get("verified") else "no",
                left or ("-" if node.get("answered") else "?"),
            )
        console.print(rows)
        return
    console.print(
        f"{session['id']}: {_int(session, 'tokens')} tokens of {session.get('model', '?')}, last used {_ago(session)}"
    )
    rows = table("node", "tier", "tokens with every layer", "chunks a layer", "size")
    for node in session.get("nodes", []):
        for tier in node.get("tiers", []):
            chunks = [int(n) for n in tier.get("layer_chunks", [])]
            spread = (
                "-" if not chunks else str(chunks[0]) if len(set(chunks)) == 1 else f"{min(chunks)} to {max(chunks)}"
            )
            held = size(_int(tier, "bytes"))
            rows.add_row(
                str(node.get("node", "?")), str(tier.get("tier", "?")), str(_int(tier, "tokens")), spread, held
            )
    console.print(rows)


def table(*columns: str, gap: int = 2) -> Table:
    """An empty table in the style of all commands; long cells are folded, not cut. gap: columns between cells."""
    made = Table(box=None, pad_edge=False, header_style="bold", padding=(0, gap, 0, 0))
    for column in columns:
        made.add_column(column, overflow="fold")
    return made


def _int(data: dict[str, Any], key: str) -> int:
    return int(data.get(key) or 0)


def _ago(summary: dict[str, Any]) -> str:
    used_s = float(summary.get("last_use_s") or 0)
    if not used_s:
        return "never"
    seconds = max(0, int(time.time() - used_s))
    return (
        f"{seconds} s ago"
        if seconds < 120
        else f"{seconds // 60} min ago"
        if seconds < 7200
        else f"{seconds // 3600} h ago"
    )
