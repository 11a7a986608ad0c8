"""`GET /upbeat.js`, `GET /upbeat.mjs`: the built web-sdk, so that a page needs nothing from anywhere else."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from aiohttp import web
from blake3 import blake3

from contracts.errors import NotFound

_BUILT = Path(__file__).resolve().parents[2] / "web-sdk" / "dist"
_HEADERS = {
    "Content-Type": "text/javascript; charset=utf-8",
    # Any page may load it, also with a hash that it must have, or isolated from other origins.
    "Access-Control-Allow-Origin": "*",
    "Cross-Origin-Resource-Policy": "cross-origin",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "public, max-age=300",
}


@cache
def _file(name: str) -> tuple[bytes, str] | None:
    path = _BUILT / name
    if not path.is_file():
        return None
    content = path.read_bytes()
    return content, f'"{blake3(content).hexdigest(16)}"'


async def show(request: web.Request) -> web.Response:
    """One of the two files."""
    name = request.path.rpartition("/")[2]
    found = _file(name)
    if found is None:
        raise NotFound(f"this gateway was installed without web-sdk/dist/{name}; build it with `make web`", code="unknown_url")
    content, tag = found
    headers = _HEADERS | {"ETag": tag}
    if request.headers.get("If-None-Match") == tag:
        return web.Response(status=304, headers=headers)
    return web.Response(body=content, headers=headers)
