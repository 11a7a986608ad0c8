"""Passes one request to the vLLM server and its answer back, piece by piece, as fast as the gateway takes them.

Whatever ends the call closes the request's connection, and vLLM aborts it. The head of an answer waits for its first
piece: until then another node can answer instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass

import aiohttp

from contracts.errors import BodyTooLarge, BodyTooSlow, InvalidRequest, RequestError, Unavailable, to_wire
from contracts.ids import check_session_id
from contracts.v1 import worker_pb2 as pb
from runtime import telemetry
from sidecar.client import ServerGone, VllmClient
from sidecar.core import headers
from sidecar.core.fields import Asked, added, check, spliced
from sidecar.core.flights import Flight, Flights
from sidecar.engine import ServedModel
from sidecar.tally import Tally
from sidecar.watching import Watching

log = telemetry.logger("sidecar.relay")
#: Seconds for a request to arrive whole; the gateway has all of it before it begins.
BODY_S = 30.0
_EVENTS = "text/event-stream"
#: How vLLM begins a stream that has failed before its first token.
_FAILED_EVENT = b'data: {"error"'
_TENANT_CHARS = _ID_CHARS = 256


@dataclass(frozen=True, slots=True)
class Limits:
    """body_bytes: of one body; held_bytes: of all bodies that the server does not have yet; requests: in flight.
    several_tenants: the deployment has more than one."""

    body_bytes: int
    held_bytes: int
    requests: int
    several_tenants: bool


class Relay:
    """See the module. draining: whether new requests are refused."""

    def __init__(
        self,
        client: VllmClient,
        watching: Watching,
        model: ServedModel,
        flights: Flights,
        secret: bytes,
        limits: Limits,
        draining: Callable[[], bool],
    ) -> None:
        self._client, self._watching, self._model, self._flights = client, watching, model, flights
        self._secret, self._limits, self._draining = secret, limits, draining
        self.tally = Tally()

    async def answer(self, ups: AsyncIterator[pb.HttpUp]) -> AsyncGenerator[pb.HttpDown, None]:
        """What the proto says of `Worker.Http`."""
        taken, ups = _Taken(self), aiter(ups)
        try:
            refusal: RequestError | None = None
            try:
                async with asyncio.timeout(BODY_S):
                    try:
                        await taken.take(ups)
                    except RequestError as e:
                        refusal = e
                        await self._read_away(ups)
            except TimeoutError:
                refusal = refusal or BodyTooSlow(f"the request did not arrive whole within {BODY_S:g} s")
            if refusal is not None:
                yield taken.refused(refusal)
                return
            async with contextlib.aclosing(self._pass_on(taken)) as downs:
                async for down in downs:
                    yield down
        finally:
            taken.end()

    async def _read_away(self, ups: AsyncIterator[pb.HttpUp]) -> None:
        """Read the rest of a refused request: gRPC may lose the answer to a caller who is still sending."""
        left = self._limits.body_bytes
        async for up in ups:
            left -= len(up.body)
            if left < 0:
                return

    async def _pass_on(self, taken: _Taken) -> AsyncGenerator[pb.HttpDown, None]:
        flight = taken.flight
        assert flight is not None
        flight.sent = True
        try:
            response = await self._client.post(taken.path, taken.body, taken.headers)
        except ServerGone as e:
            self._watching.look_at_once()
            yield taken.failed(str(e), ran=e.sent)
            return
        finally:
            taken.passed()
        try:
            is_events = response.content_type == _EVENTS
            piece = await response.content.readany()
            suspect = response.status >= 500 or (is_events and piece.startswith(_FAILED_EVENT))
            if suspect and await self._watching.engine_is_dead():
                yield taken.failed("died: its engine is dead", ran=True)
                return
            self._watching.heard()
            passed = [pb.HttpHeader(name=name, value=value) for name, value in headers.down(response.headers.items())]
            yield pb.HttpDown(head=pb.HttpAnswer(status=response.status, headers=passed))
            while piece:
                flight.answering = True
                flight.produced += piece.count(b"\n\n") if is_events else 0
                self.tally.down_bytes += len(piece)
                yield pb.HttpDown(body=piece)
                piece = await response.content.readany()
                self._watching.heard()
            taken.outcome = "answered"
        except (aiohttp.ClientError, OSError) as e:
            self._watching.look_at_once()
            yield taken.failed(f"closed the connection ({e or type(e).__name__})", ran=True)
        finally:
            response.close()

    def _checked(self, head: pb.HttpRequest) -> Flight:
        """Refuse what cannot be served now, before its body is read. Raises RequestError."""
        name = self._model.model_name
        if self._draining():
            raise Unavailable("this node is shutting down; try again")
        if head.model != name:
            raise Unavailable(f"this node does not serve {head.model[:100]!r}; it serves {name}")
        if not self._watching.up:
            raise Unavailable(f"the vLLM server of this node does not serve: {self._watching.why}; try again")
        if len(self._flights) >= self._limits.requests:
            raise Unavailable(f"this node has {len(self._flights)} requests (worker.max_waiting); try again")
        if not 0 < len(head.tenant) <= _TENANT_CHARS:
            raise InvalidRequest(f"tenant must have 1 to {_TENANT_CHARS} characters", param="tenant")
        if head.session_id:
            check_session_id(head.session_id)
        to_compute = max(int(head.prompt_tokens) - int(head.kept_tokens), 0)
        now = asyncio.get_running_loop().time()
        return Flight(head.request_id, head.priority, to_compute, int(head.expected_tokens), now)


class _Taken:
    """One call: what it holds, and how it ended. Invariant: `end` gives back everything, whenever it is called."""

    def __init__(self, relay: Relay) -> None:
        self._relay = relay
        self.flight: Flight | None = None
        self.outcome = "cancelled"
        #: For the server.
        self.path, self.body, self.headers = "", b"", dict[str, str]()
        self._request_id = ""
        self._held_bytes = 0

    async def take(self, ups: AsyncIterator[pb.HttpUp]) -> None:
        """Take the whole request. Raises RequestError."""
        relay = self._relay
        first = await anext(ups, None)
        if first is None or first.WhichOneof("kind") != "head":
            raise InvalidRequest("a request begins with its head")
        head = first.head
        self._request_id = head.request_id[:_ID_CHARS]
        flight = relay._checked(head)
        asked = Asked(
            head.request_id, head.tenant, head.session_id, head.priority, tuple(head.source_nodes), head.cache_salt
        )
        watching = relay._watching
        route = check(head.path, watching.routes, asked, relay._limits.several_tenants)
        priority = head.priority if watching.prioritises else None
        given = ((h.name, h.value) for h in head.headers)
        self.path, self.headers = head.path, headers.up(given, head.request_id, relay._client.key(), priority)
        self.flight = flight
        relay._model.begin(flight)
        fields = added(route, asked, relay._secret, transfers=watching.transfers, prioritises=watching.prioritises)
        self.body = spliced(await self._body(ups), fields)

    async def _body(self, ups: AsyncIterator[pb.HttpUp]) -> bytes:
        limits, tally = self._relay._limits, self._relay.tally
        pieces: list[bytes] = []
        async for up in ups:
            if up.WhichOneof("kind") != "body":
                raise InvalidRequest("a request has one head, then its body")
            if self._held_bytes + len(up.body) > limits.body_bytes:
                raise BodyTooLarge(f"the body has more than {limits.body_bytes} bytes (gateway.max_body_bytes)")
            if tally.held_bytes + len(up.body) > limits.held_bytes:
                raise Unavailable("this node holds as many bodies as it may (gateway.body_memory_bytes); try again")
            self._held_bytes += len(up.body)
            tally.held_bytes += len(up.body)
            tally.up_bytes += len(up.body)
            pieces.append(up.body)
        return b"".join(pieces)

    def passed(self) -> None:
        """The server has the body, or never will."""
        self.body = b""
        self._relay.tally.held_bytes -= self._held_bytes
        self._held_bytes = 0

    def refused(self, error: RequestError) -> pb.HttpDown:
        """The server never had it."""
        self.outcome = "refused"
        return pb.HttpDown(failed=pb.HttpFailure(refused=json.dumps(to_wire(error))))

    def failed(self, why: str, *, ran: bool) -> pb.HttpDown:
        """The server is lost. ran: it had the request."""
        flight = self.flight
        only = ran and flight is not None and self._relay._flights.lost(flight)
        self.outcome = "lost" if ran else "unreached"
        log.warning("request lost", request=flight and flight.request_id, reason=why, ran=ran, only=only)
        error = Unavailable(f"this node's vLLM server {why}; try again")
        return pb.HttpDown(failed=pb.HttpFailure(refused=json.dumps(to_wire(error)), ran=ran, only=only))

    def end(self) -> None:
        """Give back what is held."""
        self.passed()
        if self.flight is not None:
            self._relay._model.end(self.flight)
        elif self._request_id:
            self._relay._model.refused(self._request_id)
        self._relay.tally.outcomes[self.outcome] += 1
