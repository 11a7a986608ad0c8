"""The release of Upbeat, as shown by `upbeat --version` and `GET /version`."""

from __future__ import annotations

from functools import cache
from importlib import metadata


@cache
def version() -> str:
    """The installed distribution's version; 0+unknown when not installed."""
    try:
        return metadata.version("upbeat-server")
    except metadata.PackageNotFoundError:
        return "0+unknown"
