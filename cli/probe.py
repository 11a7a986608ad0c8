"""A health check for containers: the gateway's or a vLLM server's /health, or a service's gRPC health check."""

from __future__ import annotations

import http.client
import socket

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cli.client import CallFailed, Gateway
from contracts.identity import OPERATOR, Identity
from storelink.channel import blocking_channel
from storelink.credentials import Credentials


def healthy(
    address: str, timeout_s: float, peer: Identity | None, own: Credentials | None, *, alive: bool = False
) -> str:
    """Empty if `address` (http, https or grpc, ://host:port, or unix:PATH of a vLLM server) is healthy, else the
    reason. alive: a service that answers is healthy, also one that says that it does not serve now. Where the fleet has
    certificates: own: what this caller shows; peer: who answers. A gateway's certificate is not checked: nothing secret
    is asked, and in a container it names another host."""
    if address.startswith("unix:"):
        return _of_socket(address.removeprefix("unix:"), timeout_s)
    if address.startswith(("http://", "https://")):
        try:
            status = Gateway(address, verified=False).ask("GET", "/health").status
        except CallFailed as e:
            return str(e)
        return "" if status == 200 else f"/health answered {status}"
    if not address.startswith("grpc://"):
        return f"{address}: give http://host:port, https://host:port, grpc://host:port or unix:PATH"
    with blocking_channel(address.removeprefix("grpc://"), peer or OPERATOR, own) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except grpc.RpcError as e:
            return f"{address}: {e.code().name}"
    status = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    return "" if alive or status == "SERVING" else f"{address}: {status}"


class _OverSocket(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def _of_socket(path: str, timeout_s: float) -> str:
    connection = _OverSocket(path, timeout_s)
    try:
        connection.request("GET", "/health")
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException) as e:
        return f"{path}: {e or type(e).__name__}"
    finally:
        connection.close()
    return "" if status == 200 else f"{path}: /health answered {status}"
