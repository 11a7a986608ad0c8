"""Sends answers in one body. A large one goes out in pieces, and its tenant holds it among its bodies until the last
piece is written: a caller that reads slowly, or never, takes of its own share of memory."""

from __future__ import annotations

from collections.abc import Mapping

from aiohttp import hdrs, web

#: A larger answer is held, and sent in pieces of this size.
PIECE_BYTES = 64 << 10
#: The tenant that a request's credential names, once it is known.
TENANT = web.RequestKey("tenant", str)


def is_large(request: web.Request, response: web.StreamResponse) -> bool:
    """Whether the answer, of which nothing is sent yet, is a tenant's and has to be held."""
    if response.prepared or not isinstance(response, web.Response) or request.method == hdrs.METH_HEAD:
        return False
    return TENANT in request and isinstance(response.body, bytes) and len(response.body) > PIECE_BYTES


async def sent(
    request: web.Request, body: bytes, headers: Mapping[str, str], status: int = 200, *, closes: bool = False
) -> web.StreamResponse:
    """The answer, written whole. The caller holds its bytes. closes: the connection ends with it."""
    answer = web.StreamResponse(status=status, headers=headers)
    answer.content_length = len(body)
    if closes:
        answer.force_close()
    await answer.prepare(request)
    for at in range(0, len(body), PIECE_BYTES):
        await answer.write(body[at : at + PIECE_BYTES])
    await answer.write_eof()
    return answer
