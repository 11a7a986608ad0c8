"""`/v1/fine_tuning/jobs`: a tenant's fine-tuning jobs, for server keys. OpenAI's format."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from contracts.errors import InvalidRequest
from gateway.finetune.answers import checkpoint_objects, event_objects, job_object, listing, page
from gateway.finetune.jobs import FineTuning
from gateway.finetune.requests import job_request
from gateway.intake import check_json_type, read_json, server_caller_of
from gateway.parts import PARTS
from gateway.routes.files import number

DEFAULT_LIMIT, MAX_LIMIT = 20, 100


async def create(request: web.Request) -> web.Response:
    """Check the data and submit a job."""
    tenant = server_caller_of(request).tenant
    check_json_type(request)
    asked = job_request(await read_json(request, tenant))
    return web.json_response(await _shown(request, await _room(request).create(tenant, asked)))


async def index(request: web.Request) -> web.Response:
    """A page of jobs, the newest first: `?after=`, `?limit=`."""
    tenant = server_caller_of(request).tenant
    if filters := [name for name in request.query if name.startswith("metadata")]:
        raise InvalidRequest("jobs cannot be chosen by metadata here; leave it out", param=filters[0][:80])
    limit = number(request, "limit", DEFAULT_LIMIT, MAX_LIMIT)
    found, more = await _room(request).listed(tenant, request.query.get("after", ""), limit)
    return web.json_response(listing([await _shown(request, one) for one in found], more))


async def show(request: web.Request) -> web.Response:
    """One job."""
    return web.json_response(await _shown(request, await _found(request)))


async def cancel(request: web.Request) -> web.Response:
    """End a job."""
    tenant = server_caller_of(request).tenant
    return web.json_response(await _shown(request, await _room(request).cancel(tenant, request.match_info["job_id"])))


async def events(request: web.Request) -> web.Response:
    """A page of a job's latest events, the newest first."""
    return await _paged(request, event_objects(await _found(request)), DEFAULT_LIMIT)


async def checkpoints(request: web.Request) -> web.Response:
    """A page of a job's latest checkpoints, the newest first."""
    return await _paged(request, checkpoint_objects(await _found(request)), 10)


async def _paged(request: web.Request, items: list[dict[str, Any]], limit: int) -> web.Response:
    wanted = number(request, "limit", limit, MAX_LIMIT)
    shown, more = page(items, [item["id"] for item in items], request.query.get("after", ""), wanted)
    return web.json_response(listing(shown, more))


async def _found(request: web.Request) -> Any:
    return await _room(request).get(server_caller_of(request).tenant, request.match_info["job_id"])


async def _shown(request: web.Request, found: Any) -> dict[str, Any]:
    return job_object(found, await _room(request).results(found), request.app[PARTS].clock.wall())


def _room(request: web.Request) -> FineTuning:
    return request.app[PARTS].fine_tuning
