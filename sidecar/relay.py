"""Passes one request to the vLLM server (`Passage`) and its answer back, piece by piece, as the gateway takes them.

Whatever ends a passage closes its connection, and vLLM aborts the request. The head of an answer waits for its first
piece: until then another node can answer instead.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from contracts.errors import BodyTooLarge, InvalidRequest, RequestError, Unavailable, to_wire
from contracts.http_flights import WINDOW_BYTES
from contracts.ids import check_session_id
from contracts.v1 import worker_pb2 as pb
from runtime import telemetry
from sidecar.client import ServerGone, VllmClient
from sidecar.core import headers
from sidecar.core.fields import Asked, added, check, spliced
from sidecar.core.flights import Flight, Flights
from sidecar.engine import ServedModel
from sidecar.exchange import Exchange
from sidecar.tally import Tally
from sidecar.tracing import PassageTrace
from sidecar.watching import Watching

log = telemetry.logger("sidecar.relay")
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
    """What all requests share. draining: whether new requests are refused."""

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
        self.client, self.watching, self.model, self.flights = client, watching, model, flights
        self.secret, self.limits, self._draining = secret, limits, draining
        self.tally = Tally()

    def checked(self, head: pb.HttpRequest) -> Flight:
        """Refuse what cannot be served now, before its body is read. Raises RequestError."""
        name = self.model.model_name
        if self._draining():
            raise Unavailable("this node is shutting down; try again")
        if head.model != name:
            raise Unavailable(f"this node does not serve {head.model[:100]!r}; it serves {name}")
        if not self.watching.up:
            raise Unavailable(f"the vLLM server of this node does not serve: {self.watching.why}; try again")
        if len(self.flights) >= self.limits.requests:
            raise Unavailable(f"this node has {len(self.flights)} requests (worker.max_waiting); try again")
        if not 0 < len(head.tenant) <= _TENANT_CHARS:
            raise InvalidRequest(f"tenant must have 1 to {_TENANT_CHARS} characters", param="tenant")
        if head.session_id:
            check_session_id(head.session_id)
        to_compute = max(int(head.prompt_tokens) - int(head.kept_tokens), 0)
        now = asyncio.get_running_loop().time()
        return Flight(head.request_id, head.priority, to_compute, int(head.expected_tokens), now)


class Passage:
    """One request on its way. Call `begin` and `add` until the body is there, then await `pass_on`; call `end`,
    whatever happens. Invariant: `end` gives back everything that is held, whenever it is called."""

    def __init__(self, relay: Relay, number: int, say: Callable[[pb.HttpDown], None]) -> None:
        """number: of the flight in its call. say: sends an item of it to the gateway."""
        self._relay, self._number, self._say = relay, number, say
        self._flight: Flight | None = None
        self._outcome = "cancelled"
        #: For the server.
        self._path, self._body, self._headers = "", b"", dict[str, str]()
        self._fields: dict[str, Any] = {}
        self._request_id = ""
        self._pieces: list[bytes] = []
        self._held_bytes = 0
        #: Bytes of the answer that the gateway has room for.
        self._open = WINDOW_BYTES
        self._granted = asyncio.Event()
        #: None while traces are off.
        self._trace: PassageTrace | None = None

    # ---- the request -------------------------------------------------------------------------------------------
    def begin(self, head: pb.HttpRequest) -> None:
        """Take the head. Raises RequestError."""
        if self._request_id:
            raise InvalidRequest("a request has one head, then its body")
        relay = self._relay
        self._request_id = head.request_id[:_ID_CHARS]
        flight = relay.checked(head)
        asked = Asked(
            head.request_id, head.tenant, head.session_id, head.priority, tuple(head.source_nodes), head.cache_salt
        )
        watching = relay.watching
        route = check(head.path, watching.routes, asked, relay.limits.several_tenants)
        priority = head.priority if watching.prioritises else None
        given = ((h.name, h.value) for h in head.headers)
        self._path, self._headers = head.path, headers.up(given, head.request_id, relay.client.key(), priority)
        self._trace = PassageTrace.of(head, now=asyncio.get_running_loop().time())
        if self._trace is not None:
            self._headers |= dict(self._trace.headers)
        self._flight = flight
        relay.model.begin(flight)
        self._fields = added(route, asked, relay.secret, transfers=watching.transfers, prioritises=watching.prioritises)

    def add(self, piece: bytes, *, last: bool) -> None:
        """Take the next piece of the body. Raises RequestError."""
        limits, tally = self._relay.limits, self._relay.tally
        if self._flight is None or self._flight.sent:
            raise InvalidRequest("a request has one head, then its body")
        if self._held_bytes + len(piece) > limits.body_bytes:
            raise BodyTooLarge(f"the body has more than {limits.body_bytes} bytes (gateway.max_body_bytes)")
        if tally.held_bytes + len(piece) > limits.held_bytes:
            raise Unavailable("this node holds as many bodies as it may (gateway.body_memory_bytes); try again")
        self._held_bytes += len(piece)
        tally.held_bytes += len(piece)
        tally.up_bytes += len(piece)
        self._pieces.append(piece)
        if last:
            self._body = spliced(b"".join(self._pieces), self._fields)
            self._pieces.clear()
            self._flight.sent = True

    def grant(self, taken_bytes: int) -> None:
        """The gateway has room for so much more of the answer."""
        self._open = min(self._open + taken_bytes, WINDOW_BYTES)
        self._granted.set()

    # ---- the answer --------------------------------------------------------------------------------------------
    async def pass_on(self) -> None:
        """Pass the whole request to the server, and its answer back."""
        relay = self._relay
        try:
            response = await relay.client.post(self._path, self._body, self._headers)
        except ServerGone as e:
            relay.watching.look_at_once()
            self.fail(str(e), ran=e.sent)
            return
        finally:
            self._passed()
        try:
            await self._answer(response)
        except OSError as e:
            relay.watching.look_at_once()
            self.fail(f"closed the connection ({e or type(e).__name__})", ran=True)
        finally:
            response.close()

    async def _answer(self, response: Exchange) -> None:
        relay, flight = self._relay, self._flight
        assert flight is not None
        is_events = response.content_type == _EVENTS
        piece = await response.read()
        suspect = response.status >= 500 or (is_events and piece.startswith(_FAILED_EVENT))
        if suspect and await relay.watching.engine_is_dead():
            self.fail("died: its engine is dead", ran=True)
            return
        relay.watching.heard()
        passed = [pb.HttpHeader(name=name, value=value) for name, value in headers.down(response.headers)]
        self._say(pb.HttpDown(flight=self._number, head=pb.HttpAnswer(status=response.status, headers=passed)))
        while piece:
            flight.answering = True
            flight.produced += piece.count(b"\n\n") if is_events else 0
            relay.tally.down_bytes += len(piece)
            await self._say_body(piece)
            piece = await response.read()
            relay.watching.heard()
        self._say(pb.HttpDown(flight=self._number, end=True))
        self._outcome = "answered"

    async def _say_body(self, piece: bytes) -> None:
        """Say a piece of the answer as the gateway has room for it."""
        while len(piece) > self._open:
            if self._open:
                now, piece = piece[: self._open], piece[self._open :]
                self._open = 0
                self._say(pb.HttpDown(flight=self._number, body=now))
            self._granted.clear()
            await self._granted.wait()
        self._open -= len(piece)
        self._say(pb.HttpDown(flight=self._number, body=piece))

    # ---- ends --------------------------------------------------------------------------------------------------
    def refuse(self, error: RequestError) -> None:
        """Say why it is not answered. The server does not have it, or has it from a gateway that says nonsense."""
        self._outcome = "refused"
        self._say(pb.HttpDown(flight=self._number, failed=pb.HttpFailure(refused=json.dumps(to_wire(error)))))

    def fail(self, why: str, *, ran: bool) -> None:
        """Say that the server is lost. ran: it had the request."""
        flight = self._flight
        only = ran and flight is not None and self._relay.flights.lost(flight)
        self._outcome = "lost" if ran else "unreached"
        log.warning("request lost", request=self._request_id, reason=why, ran=ran, only=only)
        error = Unavailable(f"this node's vLLM server {why}; try again")
        failed = pb.HttpFailure(refused=json.dumps(to_wire(error)), ran=ran, only=only)
        self._say(pb.HttpDown(flight=self._number, failed=failed))

    def end(self) -> None:
        """Give back what is held."""
        self._passed()
        if self._flight is not None:
            self._relay.model.end(self._flight)
        elif self._request_id:
            self._relay.model.refused(self._request_id)
        self._relay.tally.outcomes[self._outcome] += 1
        log.debug("ended", request=self._request_id, outcome=self._outcome)
        if self._trace is not None:
            self._trace.end(self._outcome, asyncio.get_running_loop().time())

    def _passed(self) -> None:
        """The server has the body, or never will."""
        self._body = b""
        self._pieces.clear()
        self._relay.tally.held_bytes -= self._held_bytes
        self._held_bytes = 0
