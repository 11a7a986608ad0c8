"""Limits of `Worker.Http`, the call that carries all requests of a gateway to an engine with HTTP of its own."""

from __future__ import annotations

#: Bytes of one request's body in one message. Other requests' messages pass between those of a large body.
PIECE_BYTES = 256 << 10
#: Bytes of an answer that a worker may send before the gateway's reader has taken them. It bounds what a gateway holds
#: for a slow reader, and covers what an engine says within many steps.
WINDOW_BYTES = 256 << 10
#: A message has at most this many bytes.
MESSAGE_BYTES = 4 << 20
