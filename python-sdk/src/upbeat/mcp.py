"""`upbeat-mcp`: an MCP server that gives an agent host the tools `advise`, `invalidate` and `placement`.

Unlike the other hooks it waits for the gateway's answer: whoever calls a tool learns whether it worked. Over stdio, or
streamable HTTP on loopback: whoever reaches it acts with its key.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Annotated, Any

from upbeat.client import ConfigurationError, gateway_of
from upbeat.hints import DEFAULT_TTL_S, MAX_PRIORITY, MAX_SECONDS, Advisory, BadHint, Invalidation
from upbeat.names import is_name
from upbeat.version import VERSION

try:
    from mcp.server import MCPServer
    from mcp.server.mcpserver.exceptions import ToolError
    from mcp_types import ToolAnnotations
    from pydantic import Field
except ImportError as e:
    raise ImportError("upbeat.mcp needs the package mcp, version 2: pip install 'upbeat-sdk[mcp]'") from e

INSTRUCTIONS = (
    "Upbeat keeps the KV cache of each session (a conversation, or an agent's thread). Call advise as soon as you know "
    "that a session is about to send a request to its model, and before it does: its cache is then loaded in time. "
    "Call invalidate if the request will not come. A wrong hint costs idle bandwidth only."
)
MAX_ANSWER_BYTES = 1 << 20
TIMEOUT_S = 10.0

SessionId = Annotated[
    str,
    Field(
        description="The session whose request comes: what its requests send as X-Session-Id.",
        pattern=r"^[A-Za-z0-9._:-]{1,128}$",
    ),
]


@dataclass(frozen=True)
class Gateway:
    """The gateway's HTTP API, as this server uses it. base_url: without `/v1`."""

    base_url: str
    api_key: str | None = None
    timeout_s: float = TIMEOUT_S

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """The JSON object that the route answers. Raises ToolError, with the gateway's own message."""
        headers = {"Content-Type": "application/json", "User-Agent": f"upbeat-mcp/{VERSION}"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.base_url}/v1{path}", data, headers, method=method)
        try:
            with _OPENER.open(request, timeout=self.timeout_s) as response:
                said = json.loads(response.read(MAX_ANSWER_BYTES))
        except urllib.error.HTTPError as e:
            with e:
                raise ToolError(f"the gateway answered {e.code}: {_message(e.read(MAX_ANSWER_BYTES))}") from None
        except (OSError, http.client.HTTPException, ValueError) as e:
            reason = f"{type(e).__name__}: {e}"[:200]
            raise ToolError(f"the gateway at {self.base_url} gave no answer ({reason}); is it running?") from None
        if not isinstance(said, dict):
            raise ToolError(f"the gateway at {self.base_url} answered no object; is that Upbeat's address?")
        return said


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirect would carry the key elsewhere."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


#: As in the other clients, the environment's proxies are ignored.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects)


def server_of(gateway: Gateway) -> MCPServer[Any]:
    """An MCP server whose tools call this gateway."""
    server: MCPServer[Any] = MCPServer(
        "upbeat", title="Upbeat", version=VERSION, instructions=INSTRUCTIONS, log_level="WARNING"
    )

    async def advise(
        session_id: SessionId,
        expected_arrival_s: Annotated[
            float | None, Field(ge=0, le=MAX_SECONDS, description="Seconds from now until the request, if known.")
        ] = None,
        model_id: Annotated[
            str | None,
            Field(min_length=1, max_length=256, description="The model that will be asked, if not the last."),
        ] = None,
        priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY, description="Lower is more urgent.")] = 0,
        ttl_s: Annotated[
            float,
            Field(ge=0, le=MAX_SECONDS, description="Seconds after the expected arrival for which the hint counts."),
        ] = DEFAULT_TTL_S,
    ) -> dict[str, Any]:
        """Say that a session is about to send a request to its model, so that its KV cache is loaded before it comes.
        Call it before the request: while a tool runs, a document is fetched, or another agent still works."""
        try:
            hint = Advisory(session_id, model_id, expected_arrival_s, False, priority, ttl_s)
        except BadHint as e:
            raise ToolError(str(e)) from None
        return await asyncio.to_thread(gateway.call, "POST", "/advisory", hint.body(0.0))

    async def invalidate(session_id: SessionId) -> dict[str, Any]:
        """Say that the announced request will not come. Its cache may then leave fast memory first; nothing is
        deleted."""
        try:
            hint = Invalidation(session_id)
        except BadHint as e:
            raise ToolError(str(e)) from None
        return await asyncio.to_thread(gateway.call, "POST", "/invalidate", hint.body())

    async def placement(session_id: SessionId) -> dict[str, Any]:
        """The latest placements of a session's turns and hints, newest first: which node, why, whether a hint came
        before the turn (`hinted`), and where the turn's time went in seconds. Needs a server key."""
        if not is_name(session_id):  # dots alone
            raise ToolError("session_id must not consist of dots alone")
        return await asyncio.to_thread(gateway.call, "GET", f"/sessions/{session_id}/placement")

    changes = ToolAnnotations(read_only_hint=False, destructive_hint=False, idempotent_hint=True)
    reads = ToolAnnotations(read_only_hint=True)
    for tool, title, effects in (
        (advise, "Announce a session's next request", changes),
        (invalidate, "Withdraw a session's announcement", changes),
        (placement, "Why a session runs where it runs", reads),
    ):
        server.add_tool(tool, title=title, annotations=effects, structured_output=True)
    return server


def main(arguments: list[str] | None = None) -> None:
    """The console script `upbeat-mcp`."""
    parser = argparse.ArgumentParser(
        prog="upbeat-mcp",
        description="An MCP server with Upbeat's hints as tools: advise, invalidate, placement.",
        epilog="The API key comes from UPBEAT_API_KEY: arguments are visible to every user of a machine.",
    )
    parser.add_argument("--base-url", help="the gateway's address (default: UPBEAT_BASE_URL)")
    parser.add_argument(
        "--http", action="store_true", help="serve streamable HTTP on 127.0.0.1, at /mcp, instead of stdio"
    )
    parser.add_argument("--port", type=int, default=8971, help="port of --http (default: %(default)s)")
    given = parser.parse_args(arguments)
    try:
        server = server_of(Gateway(*gateway_of(given.base_url)))
    except ConfigurationError as e:
        parser.error(str(e))
    if given.http:
        server.run("streamable-http", host="127.0.0.1", port=given.port, stateless_http=True)
    else:
        server.run("stdio")


def _message(said: bytes) -> str:
    """The message of an error envelope, or the body's beginning."""
    try:
        return str(json.loads(said)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return said[:200].decode(errors="replace")


if __name__ == "__main__":
    main()
