"""gRPC channels and options shared by all processes; servers use the same limits (runtime/rpc.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc

from contracts.identity import Identity
from storelink import credentials, fleet
from storelink.credentials import Credentials

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
    # Half a minute by default: a pod that starts again has another address.
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),
    ("grpc.enable_http_proxy", 0),
    ("grpc.so_reuseport", 0),
]
#: Calls that began before a certificate was replaced go on on their channel; so many former ones are kept.
_KEPT = 2


def channel(address: str, peer: Identity, reconnect_s: float = 1.0) -> grpc.aio.Channel:
    """A channel to host:port that reconnects by itself, with a backoff of at most `reconnect_s`. Where this process has
    a certificate, what answers must be `peer`."""
    options = [*OPTIONS, ("grpc.max_reconnect_backoff_ms", int(reconnect_s * 1000))]
    own = credentials.own()
    if own is None:
        return _Channel(None, lambda: grpc.aio.insecure_channel(address, options=options))
    named: list[tuple[str, Any]] = [*options, ("grpc.ssl_target_name_override", peer.dns)]
    return _Channel(own, lambda: grpc.aio.secure_channel(address, own.client(), options=named))


def blocking_channel(address: str, peer: Identity, own: Credentials | None) -> grpc.Channel:
    """The same for a short-lived caller without an event loop."""
    options: list[tuple[str, Any]] = [("grpc.enable_http_proxy", 0), ("grpc.ssl_target_name_override", peer.dns)]
    if own is None:
        return grpc.insecure_channel(address, options=options[:1])
    return grpc.secure_channel(address, own.client(), options=options)


class _Channel(grpc.aio.Channel):
    """Makes each call with the id of the cluster secret, and with the newest certificate: on a new channel when the
    files have changed."""

    def __init__(self, own: Credentials | None, open_channel: Callable[[], grpc.aio.Channel]) -> None:
        self._own, self._open = own, open_channel
        self._generation = 0 if own is None else own.generation
        self._channels = [open_channel()]

    @property
    def newest(self) -> grpc.aio.Channel:
        """The channel for a new call."""
        if self._own is None:
            return self._channels[-1]
        self._own.newest()
        if self._own.generation != self._generation:
            self._generation = self._own.generation
            self._channels = [*self._channels[-_KEPT:], self._open()]
        return self._channels[-1]

    async def close(self, grace: float | None = None) -> None:
        for each in self._channels:
            await each.close(grace)

    async def __aenter__(self) -> _Channel:
        return self

    async def __aexit__(self, exc_type: object, exc_val: object, exc_tb: object) -> None:
        await self.close()

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self.newest.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self.newest.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self.newest.channel_ready()

    def unary_unary(self, *args: Any, **options: Any) -> Any:
        return _Calls(self, "unary_unary", args, options)

    def unary_stream(self, *args: Any, **options: Any) -> Any:
        return _Calls(self, "unary_stream", args, options)

    def stream_unary(self, *args: Any, **options: Any) -> Any:
        return _Calls(self, "stream_unary", args, options)

    def stream_stream(self, *args: Any, **options: Any) -> Any:
        return _Calls(self, "stream_stream", args, options)


class _Calls:
    """One method of a stub, on whichever channel is newest."""

    def __init__(self, owner: _Channel, kind: str, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        self._owner, self._kind, self._args, self._options = owner, kind, args, options
        self._of: grpc.aio.Channel | None = None
        self._call: Any = None

    def __call__(self, *args: Any, **options: Any) -> Any:
        newest = self._owner.newest
        if newest is not self._of:
            self._of, self._call = newest, getattr(newest, self._kind)(*self._args, **self._options)
        if own_id := fleet.own_id():
            options["metadata"] = (*(options.get("metadata") or ()), (fleet.HEADER, own_id))
        return self._call(*args, **options)
