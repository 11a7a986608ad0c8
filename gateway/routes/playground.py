"""`GET /`: the playground, a page to see it work. Its files are in `gateway/playground/` and need no build and no network."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from aiohttp import web
from blake3 import blake3

from contracts.errors import NotFound

_FILES = Path(__file__).resolve().parent.parent / "playground"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
#: Nothing but this server's own files, no script or style inside the page, and nobody may frame it.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    # Asked again at each load, and mostly answered with 304: after an upgrade nobody runs the old page.
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class _File:
    content: bytes
    type: str
    tag: str


@cache
def _files() -> dict[str, _File]:
    found = {}
    for path in sorted(_FILES.iterdir()):
        if path.suffix in _TYPES:
            content = path.read_bytes()
            found[path.name] = _File(content, _TYPES[path.suffix], f'"{blake3(content).hexdigest(16)}"')
    return found


async def page(request: web.Request) -> web.Response:
    """The page."""
    return _answer(request, "index.html")


async def part(request: web.Request) -> web.Response:
    """One of its files."""
    return _answer(request, request.match_info["name"])


def _answer(request: web.Request, name: str) -> web.Response:
    file = _files().get(name)
    if file is None:
        raise NotFound(f"the playground has no file {name[:60]!r}", code="unknown_url")
    headers = _HEADERS | {"ETag": file.tag}
    if request.headers.get("If-None-Match") == file.tag:
        return web.Response(status=304, headers=headers)
    return web.Response(body=file.content, headers=headers | {"Content-Type": file.type})
