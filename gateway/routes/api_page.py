"""`GET /docs`: the API on a page, with Swagger UI, which can also send requests. Its files are in `gateway/api_page/`.

Swagger UI is a copy of the npm package that web-sdk/package.json pins, of which `make api-page` takes two files, compressed: 0.5 MB.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from aiohttp import web

from contracts.errors import NotFound
from gateway.assets import Asset
from gateway.routes.playground import HEADERS, TYPES

_FILES = Path(__file__).resolve().parent.parent / "api_page"
#: As the playground's, and what Swagger UI needs besides: it draws with images and fonts that its style sheet holds (`data:`).
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {**HEADERS, "Content-Security-Policy": POLICY}


@cache
def files() -> dict[str, Asset]:
    """Its files by name; ours are compressed at the first call."""
    ours = {path.name: Asset.read(path) for path in sorted(_FILES.iterdir()) if path.suffix in TYPES}
    return ours | {path.stem: Asset.read_gzip(path) for path in sorted((_FILES / "vendor").glob("*.gz"))}


async def page(request: web.Request) -> web.Response:
    """The page."""
    return _answer(request, "index.html")


async def part(request: web.Request) -> web.Response:
    """One of its files."""
    return _answer(request, request.match_info["name"])


def _answer(request: web.Request, name: str) -> web.Response:
    file = files().get(name)
    if file is None:
        raise NotFound(f"this page has no file {name[:60]!r}", code="unknown_url")
    return file.answer(request, _HEADERS | {"Content-Type": TYPES[Path(name).suffix]})
