"""gRPC for all services: channels and servers with the same limits, certificates, health check and reflection."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import grpc
from grpc_health.v1 import _async as health_aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from runtime.callers import Authorise
from runtime.handshakes import Handshakes
from runtime.same_secret import SameSecret
from storelink import credentials
from storelink.channel import OPTIONS, channel

__all__ = ["SCHEDULER_RECONNECT_S", "channel", "server", "set_serving"]

#: Reconnect backoff to a scheduler. Short: it restarts within a second and rebuilds its state from nodes' reports.
SCHEDULER_RECONNECT_S = 0.25


def server(
    listen: str, service_names: Sequence[str], limits: Mapping[str, int] | None = None
) -> tuple[grpc.aio.Server, health_aio.HealthServicer]:
    """A server bound to `listen`, with health check and reflection; the caller adds services and starts it. Where this
    process has a certificate, it asks for one, and lets each caller do what `contracts.identity.MAY_CALL` says. Callers
    with another cluster secret are refused. limits: gRPC options that replace the shared ones.

    Raises OSError naming the address when it cannot listen there.
    """
    own, handshakes = credentials.own(), Handshakes()
    secure = None if own is None else own.server(handshakes.begun)
    same = SameSecret(" on ".join([*(name.rpartition(".")[2] for name in service_names[:1]), listen]))
    made = grpc.aio.server(
        options=list((dict(OPTIONS) | dict(limits or {})).items()),
        interceptors=[same] if secure is None else [Authorise(handshakes), same],
    )
    checker = health_aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(checker, made)
    reflection.enable_server_reflection([*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME], made)
    try:
        bound = made.add_insecure_port(listen) if secure is None else made.add_secure_port(listen, secure)
    except RuntimeError as e:
        raise OSError(f"cannot listen on {listen}: {e}; is another stack running there?") from e
    if not bound:
        raise OSError(f"cannot listen on {listen}; is another stack running there?")
    return made, checker


async def set_serving(checker: health_aio.HealthServicer, serving: bool) -> None:
    """Sets the answer of the standard health check."""
    status: Any = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
    await checker.set("", status)
