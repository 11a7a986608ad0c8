"""gRPC channel options shared by all processes; servers use the same limits (runtime/rpc.py)."""

from __future__ import annotations

import grpc

MAX_MESSAGE_BYTES = 64 << 20
OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Also the timeout of one attempt to connect: a busy peer needs time for its handshake.
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.enable_http_proxy", 0),
    ("grpc.so_reuseport", 0),
]


def channel(address: str, reconnect_s: float = 1.0) -> grpc.aio.Channel:
    """A channel to host:port that reconnects by itself, with a backoff of at most `reconnect_s`."""
    return grpc.aio.insecure_channel(
        address, options=[*OPTIONS, ("grpc.max_reconnect_backoff_ms", int(reconnect_s * 1000))]
    )
