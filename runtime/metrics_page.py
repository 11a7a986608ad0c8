"""`/metrics` of a process without another HTTP server, on threads of its own; and how others read it."""

from __future__ import annotations

import socket
import threading
import urllib.request
from collections.abc import Iterable
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client.exposition import ThreadingWSGIServer

from runtime import telemetry
from runtime.handshakes import refused
from storelink import credentials
from storelink.credentials import Credentials

#: Prometheus' own text format, for everybody: in OpenMetrics, prometheus_client writes vLLM's names with "_" for ":".
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
#: Timeout of a handshake and of a request.
_REQUEST_S = 5.0
#: Connections at a time; further ones are closed.
_MOST_READERS = 32


def serve_metrics(host: str, port: int) -> WSGIServer:
    """Starts it. Where this process has a certificate, readers need one of the same authority too. Raises OSError."""
    own = credentials.own()
    context = own.server_context() if own else None

    places = threading.BoundedSemaphore(_MOST_READERS)

    class Server(ThreadingWSGIServer):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

        def process_request(self, request: Any, client_address: Any) -> None:
            """On a thread, of which there are few: whoever connects without end takes none from the process's work."""
            if not places.acquire(blocking=False):
                self.shutdown_request(request)
                return
            try:
                super().process_request(request, client_address)
            except RuntimeError:  # no thread could be started
                places.release()
                self.shutdown_request(request)

        def process_request_thread(self, request: Any, client_address: Any) -> None:
            try:
                super().process_request_thread(request, client_address)
            finally:
                places.release()

        def finish_request(self, request: Any, client_address: Any) -> None:
            """On the request's own thread: who says nothing holds up nobody else."""
            request.settimeout(_REQUEST_S)
            if context is None:
                super().finish_request(request, client_address)
                return
            try:
                secured = context.wrap_socket(request, server_side=True)
            except OSError:
                refused()
                raise
            with secured:
                super().finish_request(secured, client_address)

        def handle_error(self, request: Any, client_address: Any) -> None:
            """Readers without a certificate, and those that went away, are no news."""

    server = make_server(host.strip("[]"), port, _page, Server, _Silent)
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    return server


def read_metrics(host: str, port: int, own: Credentials | None, timeout_s: float = 10.0) -> str:
    """The page of another process. own: the certificate to show; None: the fleet has none. Raises OSError."""
    context = own.client_context(any_name=True) if own else None
    url = f"{'https' if own else 'http'}://{f'[{host}]' if ':' in host else host}:{port}/metrics"
    # No proxy of the environment: internal addresses are reached directly.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
    with opener.open(url, timeout=timeout_s) as answer:
        text: bytes = answer.read()
    return text.decode()


def _page(environ: Any, start: Any) -> Iterable[bytes]:
    body = telemetry.metrics_text()
    start("200 OK", [("Content-Type", CONTENT_TYPE), ("Content-Length", str(len(body)))])
    return [body]


class _Silent(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""
