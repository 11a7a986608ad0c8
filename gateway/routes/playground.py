"""`GET /`: the playground, a page to see it work. Its files are in `gateway/playground/` and need no build and no network."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from aiohttp import web

from contracts.errors import NotFound
from gateway.assets import Asset

_FILES = Path(__file__).resolve().parent.parent / "playground"
TYPES = {
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
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    # Asked again at each load, and mostly answered with 304: after an upgrade nobody runs the old page.
    "Cache-Control": "no-cache",
}


@cache
def files() -> dict[str, Asset]:
    """Its files by name; compressed at the first call."""
    return {path.name: Asset.read(path) for path in sorted(_FILES.iterdir()) if path.suffix in TYPES}


async def page(request: web.Request) -> web.Response:
    """The page."""
    return _answer(request, "index.html")


async def part(request: web.Request) -> web.Response:
    """One of its files."""
    return _answer(request, request.match_info["name"])


def _answer(request: web.Request, name: str) -> web.Response:
    file = files().get(name)
    if file is None:
        raise NotFound(f"the playground has no file {name[:60]!r}", code="unknown_url")
    return file.answer(request, HEADERS | {"Content-Type": TYPES[Path(name).suffix]})
