"""`upbeat --version`."""

from __future__ import annotations

from typing import Annotated

import typer

from runtime.version import version


def _show(wanted: bool) -> None:
    if wanted:
        print(f"upbeat {version()}")
        raise typer.Exit


def root(
    _version: Annotated[
        bool, typer.Option("--version", callback=_show, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options before any command."""
