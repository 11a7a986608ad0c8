"""A page that a gateway serves to browsers: its files, and what a browser may do with them."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

from aiohttp import web

from contracts.errors import NotFound
from gateway.assets import Asset

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


class Page:
    """The files of a folder beside `gateway/routes`, by their names; `index.html` is the page. Those in its `vendor/` are stored, and sent,
    as gzip."""

    def __init__(self, folder: str, image_sources: str = "'self'") -> None:
        """image_sources: where images may come from, as a Content-Security-Policy says it."""
        self._folder = Path(__file__).resolve().parent.parent / folder
        self._headers = {
            # Nothing but this server's own files, no script or style inside the page, and nobody may frame it.
            "Content-Security-Policy": (
                f"default-src 'none'; script-src 'self'; style-src 'self'; img-src {image_sources}; connect-src 'self'; "
                "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
            ),
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Opener-Policy": "same-origin",
            # Asked again at each load, and mostly answered with 304: after an upgrade nobody runs the old page.
            "Cache-Control": "no-cache",
        }

    def read(self) -> None:
        """Read and compress the files, which the first answer does else."""
        _ = self._files

    @cached_property
    def _files(self) -> dict[str, Asset]:
        ours = {path.name: Asset.read(path) for path in sorted(self._folder.iterdir()) if path.suffix in _TYPES}
        return ours | {path.stem: Asset.read_gzip(path) for path in sorted((self._folder / "vendor").glob("*.gz"))}

    async def page(self, request: web.Request) -> web.Response:
        """The page."""
        return self._answer(request, "index.html")

    async def part(self, request: web.Request) -> web.Response:
        """One of its files."""
        return self._answer(request, request.match_info["name"])

    def _answer(self, request: web.Request, name: str) -> web.Response:
        file = self._files.get(name)
        if file is None:
            raise NotFound(f"this page has no file {name[:60]!r}", code="unknown_url")
        return file.answer(request, self._headers | {"Content-Type": _TYPES[Path(name).suffix]})


#: `GET /`: the playground, a page to see it work. Its files need no build and no network.
PLAYGROUND = Page("playground")
#: `GET /docs`: the API on a page, with Swagger UI, which can also send requests. It is a copy of the npm package that web-sdk/package.json
#: pins, of which `make api-page` takes two files, compressed: 0.5 MB. It draws with images and fonts that its style sheet holds (`data:`).
API_PAGE = Page("api_page", image_sources="'self' data:")
