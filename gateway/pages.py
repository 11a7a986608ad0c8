"""Refuses requests that a web page could make its visitor's browser send: to a foreign host name, or, without keys,
from a foreign site.

`core.hosts` decides; `cors` decides which pages may read answers.
"""

from __future__ import annotations

from aiohttp import HttpVersion11, hdrs, web

from contracts.errors import InvalidRequest, Misdirected
from gateway.cors import is_api, listing, refusal
from gateway.parts import PARTS

_SITE = "Sec-Fetch-Site"


def check_sender(request: web.Request) -> None:
    """Raises Misdirected for a foreign Host, InvalidRequest for a missing or doubled one, Forbidden for a foreign
    page."""
    hosts = request.app[PARTS].hosts
    if hosts.checks_names:
        named = request.headers.getall(hdrs.HOST, ())
        if len(named) > 1 or (not named and request.version >= HttpVersion11):
            raise InvalidRequest("a request needs one Host header", param=hdrs.HOST)
        # A target such as http://name/path names the host too, and overrides the header (RFC 9112, 3.2.2).
        also = () if request.raw_path.startswith("/") else (request.url.raw_authority or (request.url.raw_host or ""),)
        for name in (*named, *also):
            if not hosts.knows(name):
                raise Misdirected(
                    f"this server is not called {name[:100]!r}; list its names in gateway.hosts", param=hdrs.HOST
                )
    if hosts.checks_pages and is_api(request.path):
        origin = request.headers.get(hdrs.ORIGIN)
        if not hosts.trusts(origin, request.headers.get(_SITE)):
            remedy = f"start it with {listing(origin)}, or configure gateway.api_keys"
            raise refusal(request, "may not call a server that asks for no key", remedy)
