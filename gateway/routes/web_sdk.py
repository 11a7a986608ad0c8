"""`GET /upbeat.js`, `GET /upbeat.mjs`: the built web SDK."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from aiohttp import web

from contracts.errors import NotFound
from gateway.assets import Asset

_BUILT = Path(__file__).resolve().parents[1] / "web_sdk"
_HEADERS = {
    "Content-Type": "text/javascript; charset=utf-8",
    # Any page may load it, also with an integrity hash or when isolated from other origins.
    "Access-Control-Allow-Origin": "*",
    "Cross-Origin-Resource-Policy": "cross-origin",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "public, max-age=300",
}


@cache
def files() -> dict[str, Asset]:
    """The built files by name; compressed at the first call."""
    return {name: Asset.read(_BUILT / name) for name in ("upbeat.js", "upbeat.mjs") if (_BUILT / name).is_file()}


async def show(request: web.Request) -> web.Response:
    """Serve one of the two files."""
    name = request.path.rpartition("/")[2]
    found = files().get(name)
    if found is None:
        raise NotFound(
            f"this gateway was installed without web-sdk/dist/{name}; build it with `make web`", code="unknown_url"
        )
    return found.answer(request, _HEADERS)
