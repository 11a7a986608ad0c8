"""Keeps processes with another cluster secret out of the fleet: the newcomer stops, and whoever serves goes on."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
from prometheus_client import Counter

from contracts.cluster import log_key, secret_id
from contracts.errors import ConfigError
from runtime import telemetry
from runtime.callers import Handler, guarded
from runtime.config_file import cluster_secret, secret_file
from storelink import fleet

log = telemetry.logger("runtime.same_secret")
_REFUSED = Counter(
    "upbeat_secret_differs_total",
    "Internal calls refused because their caller has another cluster secret",
    registry=telemetry.REGISTRY,
)
#: A process stops when it has been refused for so long, in seconds, and nobody has let it in.
GRACE_S = 2.0
#: Ids of other secrets that were logged, once each.
_logged: set[str] = set()
_MOST_LOGGED = 100


def use_secret(data: Path, *, make: bool) -> Callable[[], bytes]:
    """From now on this process shows the id of DATA/secret. make: create a missing secret now, as a node does; others
    look for it again until it is there. Returns what reads the key of ids in logs; empty: not known yet. Raises
    ConfigError."""
    known: list[tuple[str, bytes]] = []

    def learn() -> None:
        secret = cluster_secret(data)
        known.append((secret_id(secret), log_key(secret)))

    def read() -> tuple[str, bytes]:
        if not known and secret_file(data).exists():
            with contextlib.suppress(ConfigError, OSError):
                learn()
        return known[0] if known else ("", b"")

    if make or os.access(secret_file(data), os.R_OK):
        learn()
    fleet.use(lambda: read()[0])
    return lambda: read()[1]


class SameSecret(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Refuses calls of processes with another cluster secret. A caller that shows none, or a server that has none, is
    not compared."""

    def __init__(self, here: str, own_id: Callable[[], str] = fleet.own_id) -> None:
        """here: what this server is called in messages."""
        self._here, self._own_id = here, own_id

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]], details: grpc.HandlerCallDetails
    ) -> Handler:
        handler = await continuation(details)
        theirs, own = fleet.said_id(details.invocation_metadata), self._own_id()
        if handler is None or not theirs or not own or theirs == own:
            return handler

        async def refuse(context: Any) -> None:
            _REFUSED.inc()
            if theirs not in _logged and len(_logged) < _MOST_LOGGED:
                _logged.add(theirs)
                log.warning("a caller with another cluster secret", its=theirs, own=own, peer=context.peer())
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, fleet.difference(theirs, self._here, own))

        return guarded(handler, refuse)


class Membership:
    """Decides when a process whose secret differs stops: at its start, while nobody has let it in. A process that
    serves goes on, whoever refuses it later."""

    def __init__(self) -> None:
        self._let_in = self._told = False
        self._refused_s: float | None = None

    def let_in(self) -> None:
        """Somebody of the fleet has answered."""
        self._let_in = True

    def failed(self, error: grpc.RpcError, now_s: float) -> None:
        """A call has failed. Raises SecretDiffers when the process is to stop."""
        differs = fleet.refusal(error)
        if differs is None:
            return
        self._refused_s = now_s if self._refused_s is None else self._refused_s
        if not self._let_in and now_s - self._refused_s >= GRACE_S:
            raise differs
        if not self._told:
            self._told = True
            log.warning("refused by another fleet", reason=str(differs))
