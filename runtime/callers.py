"""Who calls: each gRPC call is let through or refused by its caller's certificate."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from prometheus_client import Counter

from contracts.identity import MAY_CALL, Identity, Role, identity_of
from runtime import telemetry
from runtime.handshakes import Handshakes
from storelink import credentials

log = telemetry.logger("runtime.callers")
_REFUSED = Counter(
    "upbeat_calls_refused_total",
    "Internal calls refused because of their caller's certificate",
    ["method"],
    registry=telemetry.REGISTRY,
)
#: Refusals that were logged: by method and caller, once each.
_logged: set[tuple[str, str]] = set()
_MOST_LOGGED = 1000

Handler = Any  # grpc.RpcMethodHandler, whose fields its stubs do not name


class Authorise(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Lets a call through if `MAY_CALL` names its caller's role."""

    def __init__(self, handshakes: Handshakes) -> None:
        self._handshakes = handshakes

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]], details: grpc.HandlerCallDetails
    ) -> Handler:
        handler = await continuation(details)
        if handler is None:
            return None
        method = str(details.method)

        async def check(context: Any) -> None:
            self._handshakes.called(context.peer())
            who = caller(context)
            if who is None or who.role not in MAY_CALL.get(method, ()):
                await refuse(context, method, who, "by its role")

        return guarded(handler, check)


def guarded(handler: Handler, check: Callable[[Any], Awaitable[None]]) -> Handler:
    """The handler, behind a `check` of each call's context, which ends a call that it refuses."""
    for kind in ("unary_unary", "stream_unary", "unary_stream", "stream_stream"):
        if behavior := getattr(handler, kind):
            checked = _many if inspect.isasyncgenfunction(behavior) else _one
            return handler._replace(**{kind: checked(behavior, check)})
    return handler


def _one(behavior: Callable[..., Any], check: Callable[[Any], Awaitable[None]]) -> Callable[..., Any]:
    async def checked(request: Any, context: Any) -> Any:
        await check(context)
        return await behavior(request, context)

    return checked


def _many(behavior: Callable[..., Any], check: Callable[[Any], Awaitable[None]]) -> Callable[..., Any]:
    async def checked(request: Any, context: Any) -> AsyncIterator[Any]:
        await check(context)
        async with contextlib.aclosing(behavior(request, context)) as answers:
            async for answer in answers:
                yield answer

    return checked


def caller(context: Any) -> Identity | None:
    """Who calls, by its certificate; None: it names nobody."""
    names = context.auth_context().get("x509_subject_alternative_name", ())
    return identity_of(name.decode(errors="replace") for name in names)


async def as_node(context: Any, method: str, name: str) -> None:
    """Ends the call unless its caller is the node `name`, or has another role. method: as in `KvStore/Attach`. Does
    nothing where this process has no certificate."""
    if credentials.own() is None:
        return
    who = caller(context)
    if who is None or (who.role is Role.NODE and who.name != name):
        await refuse(context, f"/upbeat.v1.{method}", who, f"for {name}")


async def as_itself(messages: AsyncIterator[Any], context: Any, method: str) -> AsyncIterator[Any]:
    """The messages of a node's stream; `as_node` of the node that its hello names."""
    async for message in messages:
        if message.WhichOneof("kind") == "hello":
            await as_node(context, method, message.hello.node)
        yield message


async def refuse(context: Any, method: str, who: Identity | None, why: str) -> None:
    """Counts it, logs each caller once, and ends the call with PERMISSION_DENIED."""
    _REFUSED.labels(method.rpartition("/")[2] if method in MAY_CALL else "other").inc()
    said = "a certificate that names nobody of this fleet" if who is None else str(who)
    if (method, said) not in _logged and len(_logged) < _MOST_LOGGED:
        _logged.add((method, said))
        log.warning("call refused", method=method, caller=said, peer=context.peer(), why=why)
    await context.abort(grpc.StatusCode.PERMISSION_DENIED, f"{said} may not call {method} {why}")
