"""Pages that a gateway serves to browsers: their files and security headers."""

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
    """A page: the files of a folder of `gateway/`, by name, with `index.html`. Files in its `vendor/` are stored and
    sent as gzip."""

    def __init__(self, folder: str, image_sources: str = "'self'") -> None:
        """image_sources: allowed sources of images, as in a Content-Security-Policy."""
        self._folder = Path(__file__).resolve().parent.parent / folder
        self._headers = {
            # Only this server's files, no inline scripts or styles, no framing.
            "Content-Security-Policy": (
                f"default-src 'none'; script-src 'self'; style-src 'self'; img-src {image_sources}; connect-src "
                "'self'; "
                "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
            ),
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Opener-Policy": "same-origin",
            # Revalidate at each load (mostly 304), so that no old page runs after an upgrade.
            "Cache-Control": "no-cache",
        }

    def read(self) -> None:
        """Read and compress the files now instead of at the first request."""
        _ = self._files

    @cached_property
    def _files(self) -> dict[str, Asset]:
        ours = {path.name: Asset.read(path) for path in sorted(self._folder.iterdir()) if path.suffix in _TYPES}
        return ours | {path.stem: Asset.read_gzip(path) for path in sorted((self._folder / "vendor").glob("*.gz"))}

    async def page(self, request: web.Request) -> web.Response:
        """Serve the page."""
        return self._answer(request, "index.html")

    async def part(self, request: web.Request) -> web.Response:
        """Serve one of its files."""
        return self._answer(request, request.match_info["name"])

    def _answer(self, request: web.Request, name: str) -> web.Response:
        file = self._files.get(name)
        if file is None:
            raise NotFound(f"this page has no file {name[:60]!r}", code="unknown_url")
        return file.answer(request, self._headers | {"Content-Type": _TYPES[Path(name).suffix]})


#: `GET /`: the playground. Its files need no build and no network.
PLAYGROUND = Page("playground")
#: `GET /docs`: the API in Swagger UI, which can also send requests. `make api-page` copies two files of the npm package
#: that web-sdk/package.json pins, compressed (0.5 MB). Its style sheet contains images and fonts (`data:`).
API_PAGE = Page("api_page", image_sources="'self' data:")
