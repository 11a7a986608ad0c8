"""`upbeat certs`: makes and renews the certificates by which a fleet's processes know each other."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.client import FINE
from cli.printing import console
from contracts.errors import ConfigError
from contracts.identity import node

if TYPE_CHECKING:  # cryptography takes a moment to import
    from cli.authority import Issued

_Directory = Annotated[Path, typer.Argument(help="Where they are; `tls.directory` of the configuration.")]
_Days = Annotated[float, typer.Option(min=0.01, max=3650, help="Days that a certificate is valid.")]


def commands() -> typer.Typer:
    """The group of commands."""
    group = typer.Typer(
        name="certs",
        help="Make the certificates of a fleet (tls.directory): of its gateways, schedulers and operators, and of each "
        "node. Running processes take new files by themselves.",
        add_completion=False,
        rich_markup_mode=None,
        no_args_is_help=True,
    )
    group.command()(init)
    group.command("node")(of_node)
    group.command()(renew)
    return group


def init(
    directory: _Directory,
    nodes: Annotated[int, typer.Option(min=1, max=256, help="Nodes of the fleet.")] = 2,
    days: _Days = 365,
) -> int:
    """Make an authority in DIRECTORY, and what is missing of a fleet's certificates. What is there stays."""
    from cli.authority import Authority, everybody

    authority = Authority(directory)
    there = {one.who for one in authority.issued()}
    made = [authority.issue(who, days) for who in everybody(nodes) if who not in there]
    return _say(made, "nothing was missing")


def of_node(
    directory: _Directory,
    name: Annotated[str, typer.Argument(metavar="NODE", help="Such as node-2.")],
    days: _Days = 365,
) -> int:
    """Make the certificate of one node, in place of its former one."""
    from cli.authority import Authority

    if not re.fullmatch(r"node-(0|[1-9][0-9]{0,2})", name):
        raise ConfigError(f"NODE = {name!r}: nodes are called node-0, node-1, and so on")
    return _say([Authority(directory).issue(node(name), days)], "")


def renew(
    directory: _Directory,
    days: _Days = 365,
    every: Annotated[bool, typer.Option("--all", help="Also those with more than a third of their days left.")] = False,
) -> int:
    """Renew the certificates in DIRECTORY that expire soon."""
    from cli.authority import Authority

    authority = Authority(directory)
    there = [one.who for one in authority.issued()]
    made = [authority.issue(who, days) for who in there] if every else authority.complete(there, days)
    return _say(made, "none expires soon")


def _say(made: list[Issued], nothing: str) -> int:
    for one in made:
        console().print(f"{one.directory}: {one.who}, valid until {one.until:%Y-%m-%d %H:%M} UTC", soft_wrap=True)
    if not made:
        console().print(nothing)
    return FINE
