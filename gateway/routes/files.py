"""`/v1/files`: a tenant's files for fine-tuning, and results of it, for server keys. OpenAI's format."""

from __future__ import annotations

import asyncio
from functools import partial

from aiohttp import web

from contracts.errors import InvalidRequest
from gateway import sse
from gateway.finetune.answers import file_object, listing, page
from gateway.finetune.files import MOST_FILES
from gateway.intake import server_caller_of
from gateway.parts import PARTS

#: A browser must neither show a file's content as a page nor guess its type.
_AS_IT_IS = {
    "Content-Type": "application/octet-stream",
    "Content-Disposition": "attachment",
    "X-Content-Type-Options": "nosniff",
}
ORDERS = ("desc", "asc")


async def upload(request: web.Request) -> web.Response:
    """Take a file."""
    tenant = server_caller_of(request).tenant
    return web.json_response(file_object(await request.app[PARTS].fine_tuning.uploads.receive(request, tenant)))


async def expect(request: web.Request) -> None:
    """Answer `Expect: 100-continue`."""
    await request.app[PARTS].fine_tuning.uploads.expect(request)


async def index(request: web.Request) -> web.Response:
    """A page of files: `?purpose=`, `?limit=`, `?order=`, `?after=`."""
    tenant, query = server_caller_of(request).tenant, request.query
    order, purpose = query.get("order", ORDERS[0]), query.get("purpose")
    if order not in ORDERS:
        raise InvalidRequest(f"order must be one of {', '.join(ORDERS)}", param="order")
    limit = number(request, "limit", 10_000, 10_000)
    tuning = request.app[PARTS].fine_tuning
    found = await tuning.turns.run(tenant, partial(tuning.files.listed, tenant))
    wanted = [info for info in found[: 10 * MOST_FILES] if purpose in (None, info.purpose)]
    wanted = wanted if order == ORDERS[0] else wanted[::-1]
    items, more = page(wanted, [info.id for info in wanted], query.get("after", ""), limit)
    body = sse.encoded(listing([file_object(info) for info in items], more))
    return web.Response(body=body, content_type="application/json", charset="utf-8")


async def show(request: web.Request) -> web.Response:
    """One file."""
    tenant = server_caller_of(request).tenant
    files = request.app[PARTS].fine_tuning.files
    return web.json_response(file_object(await asyncio.to_thread(files.get, tenant, request.match_info["file_id"])))


async def content(request: web.Request) -> web.StreamResponse:
    """A file's content, as it was uploaded."""
    tenant = server_caller_of(request).tenant
    files = request.app[PARTS].fine_tuning.files
    path = await asyncio.to_thread(files.content, tenant, request.match_info["file_id"])
    return web.FileResponse(path, headers=_AS_IT_IS)


async def delete(request: web.Request) -> web.Response:
    """Delete a file. Jobs that train on it go on."""
    tenant, file_id = server_caller_of(request).tenant, request.match_info["file_id"]
    await asyncio.to_thread(request.app[PARTS].fine_tuning.files.delete, tenant, file_id)
    return web.json_response({"id": file_id, "object": "file", "deleted": True})


def number(request: web.Request, name: str, default: int, most: int) -> int:
    """A number from 1 to `most` in the query. Raises InvalidRequest."""
    text = request.query.get(name, str(default))
    if not text.isascii() or not text.isdigit() or not 1 <= int(text[:9]) <= most:
        raise InvalidRequest(f"{name} must be an integer from 1 to {most}", param=name)
    return int(text[:9])
