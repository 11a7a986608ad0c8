"""Reads request bodies within limits of size, memory share and time.

`core.bodies` decides what a body costs, when it is too slow, and which body is dropped for room.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator

from aiohttp import hdrs, web

from contracts.errors import BodyTooLarge, BodyTooSlow, InvalidRequest, RequestError, Unavailable
from gateway import metrics
from gateway.core.admission import check_length
from gateway.core.bodies import Arrival, Arrivals, Tally
from gateway.core.shares import Shares

#: Unauthenticated senders share 1/8 of the bytes held at a time.
UNAUTHENTICATED_SHARE = 8


class _Pool:
    """Bytes held by one kind of owner: tenants, or unauthenticated callers' addresses."""

    def __init__(self, limit_bytes: int, share: float) -> None:
        self.shares, self.arrivals = Shares(limit_bytes, share), Arrivals()
        #: Callbacks that stop reading a body that is dropped for room.
        self.stop: dict[Arrival, Callable[[], None]] = {}

    def free(self, owner: str) -> int:
        return min(self.shares.most - self.shares.of(owner), self.shares.limit - self.shares.held)

    def make_room(self, owner: str, wanted: int) -> bool:
        """Drop a stalled body, of this owner if its share is full, else of the owner that holds most. Returns whether
        one was dropped."""
        mine = self.shares.of(owner) + wanted > self.shares.most
        holder = owner if mine else self.shares.greediest()
        slowest = None if holder is None else self.arrivals.slowest(holder, asyncio.get_running_loop().time())
        if slowest is None:
            return False
        slowest.given_up = True
        self.stop[slowest]()
        return True


#: A request's pool, owner and held bytes, until it has ended.
_HELD = web.RequestKey("held body bytes", tuple[_Pool, str, int])


class Bodies:
    """All bodies that this process holds."""

    def __init__(self, limit_bytes: int, tenant_share: float, address_share: float, max_body_bytes: int) -> None:
        """limit_bytes: bytes of authenticated callers' bodies held at a time. tenant_share: the part that one tenant
        may hold. address_share: the part of unauthenticated callers' bytes that one address may hold. max_body_bytes:
        limit of one body."""
        self._callers = _Pool(limit_bytes, tenant_share)
        self._unauthenticated = _Pool(limit_bytes // UNAUTHENTICATED_SHARE, address_share)
        self._max_body_bytes = max_body_bytes

    @property
    def held(self) -> int:
        """Bytes held now."""
        return self._callers.shares.held + self._unauthenticated.shares.held

    async def read(
        self,
        request: web.Request,
        owner: str,
        limit_bytes: int,
        useful_bytes: int | None = None,
        *,
        unauthenticated: bool = False,
    ) -> tuple[bytes, Tally]:
        """The body, held until `release`, and its tally. useful_bytes: length of the longest body that some model could
        read; None: unknown.

        Raises BodyTooLarge, at once by Content-Length or when a chunked body crosses a limit; BodyTooSlow; Unavailable
        when the owner's share or the total is full; InvalidRequest for a compressed body."""
        encoding = request.headers.get(hdrs.CONTENT_ENCODING)
        if encoding is not None and encoding.strip().lower() not in ("", "identity"):
            raise InvalidRequest(
                "compressed bodies are not supported; send the body as it is", param="Content-Encoding"
            )
        pool = self._unauthenticated if unauthenticated else self._callers
        limit = min(self._max_body_bytes, limit_bytes, pool.shares.most)

        def check(length: int) -> None:
            check_length(length, limit)
            if useful_bytes is not None and length > useful_bytes:
                raise BodyTooLarge(
                    f"no prompt that this server's models can read is longer than {useful_bytes} bytes of JSON; "
                    "shorten it"
                )

        length, tally = request.content_length or 0, Tally()
        check(length)
        if not request.content.is_eof():
            if length > pool.free(owner) and not pool.make_room(owner, length):
                raise _no_room()
            return await self._arrived(request, owner, pool, tally, check), tally
        body = request.content.read_nowait()  # it arrived together with its headers
        tally.add(body)
        check(tally.length)
        if not pool.shares.take(owner, tally.length):
            raise _no_room()
        request[_HELD] = (pool, owner, tally.length)
        return body, tally

    async def _arrived(
        self, request: web.Request, owner: str, pool: _Pool, tally: Tally, check: Callable[[int], None]
    ) -> bytes:
        """Read the body piece by piece while it is fast enough. Raises what `read` raises."""
        loop = asyncio.get_running_loop()
        arrival, body = pool.arrivals.begin(owner, loop.time()), bytearray()
        try:
            async with asyncio.timeout_at(arrival.due_s()) as deadline:

                def stop() -> None:
                    self.release(request)
                    if not deadline.expired():  # else it ends anyway, and cannot be moved
                        deadline.reschedule(loop.time())

                pool.stop[arrival] = stop
                async for piece in request.content.iter_any():
                    if arrival.given_up:
                        raise TimeoutError
                    tally.add(piece)
                    check(tally.length)
                    arrival.last_s = loop.time()
                    while not pool.shares.take(owner, len(piece)):
                        if not pool.make_room(owner, len(piece)):
                            raise _no_room()
                    body += piece
                    arrival.held = tally.length
                    request[_HELD] = (pool, owner, tally.length)
                    deadline.reschedule(arrival.due_s())
        except RequestError:
            raise
        except TimeoutError:
            why = "there is no room for a body that rests" if arrival.given_up else "the body did not arrive in time"
            raise BodyTooSlow(f"{why}; send it at once") from None
        except (web.RequestPayloadError, ValueError) as e:
            raise InvalidRequest(f"the body could not be read: {e}", code="invalid_body") from None
        finally:
            pool.arrivals.end(arrival)
            pool.stop.pop(arrival, None)
        return bytes(body)

    def hold(self, request: web.Request, amount: int) -> None:
        """Hold `amount` bytes for the decoded body instead of its length. Raises BodyTooLarge when its owner may never
        hold that much, Unavailable when not enough is free."""
        pool, owner, held = request[_HELD]
        if amount > pool.shares.most:
            raise BodyTooLarge(
                "the body holds too many values for this server's memory; send fewer, or raise "
                "gateway.body_memory_bytes"
            )
        if amount < held:
            pool.shares.give(owner, held - amount)
        elif not pool.shares.take(owner, amount - held):
            raise _no_room()
        request[_HELD] = (pool, owner, amount)

    def hold_more(self, request: web.Request, amount: int) -> None:
        """Hold `amount` bytes more, of an answer that is made. Raises Unavailable when not enough is free."""
        pool, owner, held = request[_HELD]
        if not pool.shares.take(owner, amount):
            raise _no_room()
        request[_HELD] = (pool, owner, held + amount)

    @contextlib.contextmanager
    def sending(self, tenant: str, amount: int) -> Iterator[None]:
        """Hold an answer of `amount` bytes of the tenant's while it is sent; one that is larger than the tenant's share
        holds the share. Raises Unavailable when not enough is free."""
        shares = self._callers.shares
        amount = min(amount, shares.most)
        if not shares.take(tenant, amount):
            raise _no_room()
        try:
            yield
        finally:
            shares.give(tenant, amount)

    def release(self, request: web.Request) -> None:
        """Free the request's bytes: it has ended, or its body is dropped. Safe to call twice."""
        held = request.get(_HELD)
        if held is not None:
            del request[_HELD]
            pool, owner, amount = held
            pool.shares.give(owner, amount)


def _no_room() -> Unavailable:
    metrics.SHED.labels("bodies").inc()
    return Unavailable("this gateway holds as much of your, or of all requests as it can; try again", code="overloaded")
