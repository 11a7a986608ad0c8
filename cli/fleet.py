"""How the answers of a running stack are shown: the fleet, sessions, and where their KV is."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.table import Table

GIB = 1 << 30
MIB = 1 << 20
#: Windows with fewer columns get short headings, and what is the same in all rows is said once.
WIDE = 120
#: What a list without sessions says: a short conversation is served like any other, and is not in it.
NO_SESSIONS = (
    "no sessions yet: one is listed when it has a whole chunk of tokens in the cache\n"
    "(kv.chunk_tokens, 64 by default); a shorter conversation keeps nothing"
)


def show_fleet(console: Console, all_serve: bool, fleet: dict[str, Any]) -> None:
    """A line of state, then a line a node. all_serve: /ready?all=1 is 200."""
    nodes = fleet.get("nodes", [])
    serving = sum(bool(node.get("serving")) for node in nodes)
    expected = int(fleet.get("expected_nodes", len(nodes)))
    missing = "; ".join(map(str, fleet.get("missing", [])))
    state = "ready" if all_serve else "partly ready" if fleet.get("ready") else "not ready"
    console.print(f"{state}: {serving} of {expected} nodes serve{missing and ' (' + missing + ')'}")
    schedulers = fleet.get("schedulers", [])
    if len(schedulers) > 1:
        told = (f"{s.get('address')} {s.get('state')} ({_int(s, 'nodes')} nodes, {_int(s, 'advised')} hints)" for s in schedulers)
        console.print(f"{len(schedulers)} schedulers: {'; '.join(told)}")
    models = [", ".join(str(model.get("name", "?")) for model in node.get("models", [])) or "-" for node in nodes]
    if console.width >= WIDE:
        rows = table("node", "state", "model", "running", "waiting", "tokens due", "hints", "HBM used", "DRAM used", "SSD", "sessions")
    else:
        console.print(f"models: {', '.join(sorted(set(models) - {'-'})) or 'none'}; DRAM and SSD in GiB")
        rows = table("node", "state", "run", "wait", "due", "hints", "HBM", "DRAM", "SSD", "sessions", gap=1)
    for node, model in zip(nodes, models, strict=True):
        cells = _fleet_cells(node, model)
        rows.add_row(
            *(
                cells
                if console.width >= WIDE
                else [*cells[:2], *cells[3:8], *(c.replace(" of ", "/").removesuffix(" GiB") for c in cells[8:])]
            )
        )
    console.print(rows)


def _fleet_cells(node: dict[str, Any], model: str) -> list[str]:
    total, free = _int(node, "hbm_pages_total"), _int(node, "hbm_pages_free")
    return [
        str(node.get("node", "?")),
        str(node.get("state") or ("serving" if node.get("serving") else "not serving")),
        model,
        str(_int(node, "running")),
        str(_int(node, "waiting")),
        f"{float(node.get('outstanding_tokens', 0)):.0f}",
        str(_int(node, "advised")),
        f"{(total - free) / total:.0%}" if total else "-",
        f"{_int(node, 'dram_bytes_used') / GIB:.2f} of {_int(node, 'dram_bytes_total') / GIB:.2f} GiB",
        size(_int(node, "ssd_bytes_used")),
        str(_int(node, "sessions")),
    ]


def size(bytes_: float) -> str:
    """For people: what is less than a GiB is not 0.00 of them."""
    return f"{bytes_ / GIB:.2f} GiB" if bytes_ >= GIB else f"{bytes_ / MIB:.1f} MiB"


def show_sessions(console: Console, sessions: list[dict[str, Any]], *, more: bool = False) -> None:
    """A line a session, as they come. more: there are others."""
    console.print(session_table(sessions, console.width) if sessions else NO_SESSIONS)
    if more:
        console.print("there are more: --limit N, or --all")


def session_table(sessions: list[dict[str, Any]], width: int) -> Table:
    """A row a session; in narrow windows without the model where all have the same."""
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
    """One session: a line a node and tier; of one that is being erased, what each node still has."""
    if session.get("status") == "erasing":
        console.print(f"{session['id']} is being erased; nothing of it is served")
        rows = table("node", "confirmed", "chunks left")
        for node in session.get("nodes", []):
            left = ", ".join(f"{tier} {chunks}" for tier, chunks in node.get("left", {}).items())
            rows.add_row(
                str(node.get("node", "?")), "yes" if node.get("verified") else "no", left or ("-" if node.get("answered") else "?")
            )
        console.print(rows)
        return
    console.print(f"{session['id']}: {_int(session, 'tokens')} tokens of {session.get('model', '?')}, last used {_ago(session)}")
    rows = table("node", "tier", "tokens with every layer", "chunks a layer", "size")
    for node in session.get("nodes", []):
        for tier in node.get("tiers", []):
            chunks = [int(n) for n in tier.get("layer_chunks", [])]
            spread = "-" if not chunks else str(chunks[0]) if len(set(chunks)) == 1 else f"{min(chunks)} to {max(chunks)}"
            held = size(_int(tier, "bytes"))
            rows.add_row(str(node.get("node", "?")), str(tier.get("tier", "?")), str(_int(tier, "tokens")), spread, held)
    console.print(rows)


def table(*columns: str, gap: int = 2) -> Table:
    """An empty table as all commands show them; what does not fit into a cell is folded, never cut. gap: between columns."""
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
    return f"{seconds} s ago" if seconds < 120 else f"{seconds // 60} min ago" if seconds < 7200 else f"{seconds // 3600} h ago"
