"""`upbeat leave NODE`: a node leaves the fleet for good, and nothing is lost."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.client import NOBODY, CallFailed
from cli.options import whole_option
from cli.printing import console
from cli.settings import Flags, layout

if TYPE_CHECKING:  # gRPC takes a moment to import
    from contracts.v1.scheduler_pb2 import LeaveNodeReply
    from storelink.credentials import Credentials

_POLL_S = 0.5


def leave(
    node: Annotated[str, typer.Argument(metavar="NODE", help="Such as node-2.")],
    lost: Annotated[
        bool, typer.Option("--lost", help="The node is down and never comes back; what only it held is recomputed.")
    ] = False,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Do not wait until it has left; it goes on.")] = False,
    scheduler: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT", help="The fleet's schedulers, separated by commas.  [default: as configured]"
        ),
    ] = None,
    port: Annotated[int | None, whole_option("The gateway's port, from which the scheduler's follows.")] = None,
    data: Annotated[Path | None, typer.Option(help="The fleet's data directory.  [default: data]")] = None,
    config: Annotated[Path | None, typer.Option(help="Configuration in YAML.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print states as JSON, an object a line.")] = False,
) -> int:
    """Let a node leave the fleet: it finishes its requests, writes what the blob tier lacks, and ends. Its sessions go
    on elsewhere, from their cache. Again: shows how far it is."""
    from cli.schedulers import operator_of

    schedulers = [part.strip() for part in scheduler.split(",")] if scheduler is not None else []
    resolved = layout(Flags(port=port, data=data, config=config, schedulers=schedulers))
    own, shown = operator_of(resolved), ""
    while True:
        replies, silent = _ask_all(resolved.scheduler_addresses, own, node, lost=lost)
        if silent and not shown:
            again = f"when it is back, let it know with `upbeat leave {node} --lost`"
            print(f"upbeat: warning: {silent[0]}; {again}", file=sys.stderr)
        reply = next((one for one in replies if one.state != "left"), replies[0])
        if (said := describe(node, reply)) != shown:
            shown = said
            if as_json:
                print(json.dumps(_as_json(node, reply)), flush=True)
            else:
                console().print(said, markup=False)
        if reply.state == "left" or no_wait:
            return 0
        time.sleep(_POLL_S)


def _ask_all(
    addresses: Sequence[str], own: Credentials | None, node: str, *, lost: bool
) -> tuple[list[LeaveNodeReply], list[CallFailed]]:
    """What the schedulers say, and of each that does not answer why. Raises CallFailed when one refuses, or none
    answers."""
    from cli.schedulers import ask_to_leave

    replies, silent = [], []
    for address in addresses:
        try:
            replies.append(ask_to_leave(address, own, node, lost=lost))
        except CallFailed as e:
            if e.status != NOBODY:
                raise
            silent.append(e)
    if not replies:
        raise silent[0]
    return replies, silent


def describe(node: str, reply: LeaveNodeReply) -> str:
    """One line."""
    if reply.state == "left":
        return f"{node} has left"
    if reply.state == "draining":
        return f"{node} finishes {reply.requests} request{'' if reply.requests == 1 else 's'}"
    pending = f" ({reply.pending_bytes / (1 << 20):.1f} MiB to write)" if reply.pending_bytes else ""
    return f"{node} writes back{f', and waits for {reply.waits_for}' if reply.waits_for else ''}{pending}"


def _as_json(node: str, reply: LeaveNodeReply) -> dict[str, object]:
    return {
        "node": node,
        "state": reply.state,
        "requests": reply.requests,
        "waits_for": reply.waits_for,
        "pending_bytes": reply.pending_bytes,
    }
