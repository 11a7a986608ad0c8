"""Which release of Upbeat this is: what `upbeat --version` and `GET /version` say."""

from __future__ import annotations

from functools import cache
from importlib import metadata


@cache
def version() -> str:
    """The installed distribution's version; 0+unknown where the code runs without having been installed."""
    try:
        return metadata.version("upbeat-server")
    except metadata.PackageNotFoundError:
        return "0+unknown"
