"""HTTP to the vLLM server, over its socket or its port: requests of gateways (`exchange`), and questions of ours.

A connection a request: closing it is how vLLM hears that nobody waits for the answer any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path

import aiohttp

from sidecar.exchange import Exchange

#: Seconds for a connection, and for an answer to a question about the server itself. The latter is longer than a server
#: may be silent before it counts as stalled, so that a slow answer ends that.
CONNECT_S, ASK_S = 5.0, 10.0
#: Bytes of an answer to such a question; vLLM's own description of its routes has a quarter of a million.
_MOST_BYTES = 16 << 20


class ServerGone(Exception):
    """The server is not there, or closed the connection. sent: it may have had the request."""

    def __init__(self, why: str, *, sent: bool) -> None:
        super().__init__(why)
        self.sent = sent


class ServerSilent(Exception):
    """The server did not answer in time."""


class VllmClient:
    """See the module. Use it on one event loop, and close it."""

    def __init__(self, place: Path | str, key: Callable[[], str]) -> None:
        """place: the server's socket, or its URL without a path. key: reads its API key; empty: it has none. Raises
        OSError."""
        self._place = place
        connector: aiohttp.BaseConnector
        if isinstance(place, Path):
            self._url, connector = "http://vllm", aiohttp.UnixConnector(str(place), force_close=True, limit=0)
        else:
            self._url, connector = place, aiohttp.TCPConnector(force_close=True, limit=0)
        self.key = key
        self._session = aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            trust_env=False,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            skip_auto_headers=("user-agent",),
        )

    async def close(self) -> None:
        """Close every connection."""
        await self._session.close()

    async def post(self, path: str, body: bytes, headers: Mapping[str, str]) -> Exchange:
        """The answer, once its head is here; the caller closes it. Raises ServerGone."""
        try:
            async with asyncio.timeout(CONNECT_S):
                exchange = await Exchange.connect(self._place)
        except OSError as e:
            raise ServerGone(f"cannot be reached ({_reason(e)})", sent=False) from e
        try:
            await exchange.begin(path, headers, body)
        except OSError as e:
            exchange.close()
            raise ServerGone(f"closed the connection ({_reason(e)})", sent=True) from e
        except BaseException:
            exchange.close()
            raise
        return exchange

    async def ask(self, path: str, body: bytes | None = None, timeout_s: float = ASK_S) -> tuple[int, bytes]:
        """Status and body of a question about the server itself: a GET, or a POST of JSON. Raises ServerGone,
        ServerSilent."""
        headers = {"accept-encoding": "identity", "content-type": "application/json"}
        if key := self.key():
            headers["authorization"] = f"Bearer {key}"
        try:
            async with self._session.request(
                "GET" if body is None else "POST",
                self._url + path,
                data=body,
                headers=headers,
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(total=timeout_s),
            ) as answer:
                found = bytearray()
                async for piece in answer.content.iter_any():
                    found += piece
                    if len(found) > _MOST_BYTES:
                        raise ServerGone(f"{path} has more than {_MOST_BYTES} bytes", sent=True)
                return answer.status, bytes(found)
        except TimeoutError as e:
            raise ServerSilent(f"{path} was not answered within {timeout_s:g} s") from e
        except (aiohttp.ClientError, OSError) as e:
            raise ServerGone(f"cannot be asked ({_reason(e)})", sent=False) from e


def _reason(error: BaseException) -> str:
    return str(error) or type(error).__name__
