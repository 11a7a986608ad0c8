"""A minimal reverse proxy in aiohttp: forwards the body unchanged and streams the answer back."""

from __future__ import annotations

import asyncio
import sys

import aiohttp
import uvloop
from aiohttp import web

_NOT_PASSED = frozenset({"host", "content-length", "transfer-encoding", "connection"})


async def serve(port: int, backend: str) -> None:
    """Serve until killed."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), auto_decompress=False) as session:

        async def forward(request: web.Request) -> web.StreamResponse:
            body = await request.read()
            headers = {name: value for name, value in request.headers.items() if name.lower() not in _NOT_PASSED}
            async with session.request(request.method, backend + request.path_qs, data=body, headers=headers) as answer:
                if answer.content_length is not None:
                    return web.Response(
                        status=answer.status, body=await answer.read(), content_type=answer.content_type
                    )
                response = web.StreamResponse(
                    status=answer.status, headers={"Content-Type": answer.headers["Content-Type"]}
                )
                await response.prepare(request)
                async for piece in answer.content.iter_any():
                    await response.write(piece)
                await response.write_eof()
                return response

        app = web.Application(client_max_size=64 << 20)
        app.router.add_route("*", "/{path:.*}", forward)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), sys.argv[2]))
