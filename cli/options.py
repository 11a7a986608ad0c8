"""Options that several commands share, and number options that name a wrong value."""

from __future__ import annotations

from typing import Annotated, Any

import typer

DEFAULT_URL = "http://127.0.0.1:8080"
Url = Annotated[str, typer.Option("--url", envvar="UPBEAT_URL", help="The gateway's URL.")]
Key = Annotated[
    str,
    typer.Option("--key", envvar="UPBEAT_API_KEY", help="A server key, where keys are configured.", show_default=False),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Models = Annotated[
    list[str] | None,
    typer.Option(
        metavar="[NAME=]DIR|ID",
        help="A Hugging Face directory, or a hub id: owner/name or owner/name@revision; repeat with names for several "
        "models.  [default: the bundled model]",
        show_default=False,
    ),
]


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a whole number; give one such as 2") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a number; give one such as 0.5") from None


def whole_option(text: str) -> Any:
    """A whole number; text: its help."""
    return typer.Option(parser=_whole, metavar="INT", help=text)


def number_option(text: str) -> Any:
    """A number; text: its help."""
    return typer.Option(parser=_number, metavar="NUMBER", help=text)
