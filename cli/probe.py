"""A health check for containers: the gateway's /health, or a service's gRPC health check."""

from __future__ import annotations

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cli.client import CallFailed, Gateway
from contracts.identity import OPERATOR, Identity
from storelink.channel import blocking_channel
from storelink.credentials import Credentials


def healthy(address: str, timeout_s: float, peer: Identity | None, own: Credentials | None) -> str:
    """Empty if `address` (http, https or grpc, ://host:port) is healthy, else the reason. Where the fleet has
    certificates: own: what this caller shows; peer: who answers. A gateway's certificate is not checked: nothing secret
    is asked, and in a container it names another host."""
    if address.startswith(("http://", "https://")):
        try:
            status = Gateway(address, verified=False).ask("GET", "/health").status
        except CallFailed as e:
            return str(e)
        return "" if status == 200 else f"/health answered {status}"
    if not address.startswith("grpc://"):
        return f"{address}: give http://host:port, https://host:port or grpc://host:port"
    with blocking_channel(address.removeprefix("grpc://"), peer or OPERATOR, own) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except grpc.RpcError as e:
            return f"{address}: {e.code().name}"
    status = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    return "" if status == "SERVING" else f"{address}: {status}"
