"""Peers read over sockets where NIXL is missing: a request names a lease and ranges; the answer is their bytes.

Only ranges leased to the reader are served, and lengths are checked before anything is sent or read. Threads and
blocking sockets on both sides: bytes move between socket and arena without passing through Python objects.

On one machine a Unix socket serves processes of the same user (`runtime.same_machine`). Beyond it, over TCP: where the
process has a certificate, both sides use TLS; the reader must be the node that the lease is for, and the owner the node
that is asked.

Request: magic, length of the lease name, number of ranges; the name; (offset, length) per range. Answer: one status
byte (1: the bytes follow, 0: refused).
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import struct
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from contracts import identity
from contracts.identity import Role, identity_of
from kvstore.metrics import log
from kvstore.tiers.arena import Arena
from kvstore.tiers.transport import Card, GivenUp, LeasedRanges, PeerRange, never
from runtime import same_machine
from runtime.handshakes import refused
from storelink import credentials

_MAGIC = b"UPBT"
_HEAD = struct.Struct("<4sHI")
_RANGE = struct.Struct("<QQ")
_MAX_RANGES, _MAX_NAME = 1 << 16, 256
#: Timeouts of an idle connection, and of one whole read.
_IDLE_S, _READ_S = 120.0, 4.0
_CONNECTIONS = 4
#: Timeout of a TLS handshake.
_HANDSHAKE_S = 2.0
#: Most TLS handshakes at a time, and the pause after a connection that could not be accepted, in seconds.
_HANDSHAKES, _ACCEPT_PAUSE_S = 64, 0.2


class SocketTransport:
    """See the module. listen: host:port of this node. address: how peers reach it. read_s: timeout of one read."""

    name = "socket"

    def __init__(self, arena: Arena, leases: LeasedRanges, listen: str, address: str, read_s: float = _READ_S) -> None:
        self._arena = arena
        self._leases = leases
        self._listen = listen
        self._address = address
        self._read_s = read_s
        self._servers: list[socket.socket] = []
        self._local_name = ""
        self._pool = ThreadPoolExecutor(_CONNECTIONS, thread_name_prefix="peer-read")
        self._idle: dict[str, list[socket.socket]] = {}
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._stopped = False
        self._own = credentials.own()
        self._serving = self._own.server_context() if self._own else None
        self._handshakes = threading.BoundedSemaphore(_HANDSHAKES)

    async def start(self) -> None:
        """Raises OSError naming the address when the port is in use."""
        host, _, port = self._listen.rpartition(":")
        try:
            self._servers.append(_listening(host.strip("[]"), int(port)))
        except OSError as e:
            raise OSError(f"cannot listen on {self._listen}: {e.strerror}; is another stack running there?") from e
        if (local := same_machine.listening()) is not None:
            self._servers.append(local[0])
            self._local_name = local[1]
        for server in self._servers:
            threading.Thread(target=self._accept, args=(server,), name="peer-accept", daemon=True).start()

    def fill(self, card: Card) -> Card:
        return card._replace(socket_address=self._address, local_name=self._local_name)

    # ---- the owner's side

    def _accept(self, server: socket.socket) -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError as e:
                if self._stopped:
                    return
                log.warning("a peer's connection could not be accepted", error=str(e))
                time.sleep(_ACCEPT_PAUSE_S)  # for example no descriptor is free
                continue
            connection.settimeout(_IDLE_S)
            if not self._admits(connection):
                connection.close()
                continue
            self._open.add(connection)
            try:
                threading.Thread(target=self._serve, args=(connection,), name="peer-serve", daemon=True).start()
            except RuntimeError as e:  # no thread can be started
                log.warning("a peer's connection could not be served", error=str(e))
                self._open.discard(connection)
                if self._shakes_hands(connection):
                    self._handshakes.release()
                connection.close()

    def _admits(self, connection: socket.socket) -> bool:
        """Whether to serve it. Who has not shown a certificate yet must not use up threads and descriptors."""
        if connection.family == socket.AF_UNIX:
            return same_machine.is_own(connection)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return not self._shakes_hands(connection) or self._handshakes.acquire(blocking=False)

    def _shakes_hands(self, connection: socket.socket) -> bool:
        return self._serving is not None and connection.family != socket.AF_UNIX

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError, struct.error, ValueError), self._secured(connection) as secured:
            try:
                while self._answer(secured):
                    pass
            finally:
                self._open.discard(secured)
        self._open.discard(connection)
        connection.close()

    def _secured(self, connection: socket.socket) -> socket.socket:
        """The connection after its handshake. Raises OSError."""
        if self._serving is None or not self._shakes_hands(connection):
            return connection
        connection.settimeout(_HANDSHAKE_S)
        try:
            secured = self._serving.wrap_socket(connection, server_side=True)
        except OSError:
            refused()
            raise
        finally:
            self._handshakes.release()
        secured.settimeout(_IDLE_S)
        self._open.add(secured)
        self._open.discard(connection)
        return secured

    def _may_read(self, connection: socket.socket, lease: str) -> bool:
        return not isinstance(connection, ssl.SSLSocket) or _node_of(connection) == self._leases.reader(lease)

    def _answer(self, connection: socket.socket) -> bool:
        magic, name_length, count = _HEAD.unpack(_receive(connection, _HEAD.size))
        if magic != _MAGIC or name_length > _MAX_NAME or not 0 < count <= _MAX_RANGES:
            return False
        lease = _receive(connection, name_length).decode()
        ranges = list(_RANGE.iter_unpack(_receive(connection, count * _RANGE.size)))
        allowed = self._may_read(connection, lease)
        if not allowed or not all(self._leases.allowed(lease, offset, length) for offset, length in ranges):
            connection.sendall(b"\0")
            return True
        connection.sendall(b"\1")
        for offset, length in ranges:
            connection.sendall(self._arena.view[offset : offset + length])
        return True

    # ---- the reader's side

    async def read(self, peer: Card, lease: str, ranges: Sequence[PeerRange], given_up: GivenUp = never) -> bool:
        if self._stopped:
            return False
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._read, peer, lease, ranges, given_up)

    def _read(self, peer: Card, lease: str, ranges: Sequence[PeerRange], given_up: GivenUp) -> bool:
        address = peer.socket_address
        if given_up():
            return False
        deadline = time.monotonic() + self._read_s
        name = lease.encode()
        question = (
            _HEAD.pack(_MAGIC, len(name), len(ranges))
            + name
            + b"".join(_RANGE.pack(there, length) for there, _, length in ranges)
        )
        for reused in (True, False):
            connection = self._connect(peer, reused)
            if connection is None:
                continue
            self._open.add(connection)
            try:
                answer = bytearray(1)
                try:
                    connection.settimeout(self._read_s)
                    connection.sendall(question)
                    _receive_into(connection, memoryview(answer), deadline)
                except OSError:
                    connection.close()
                    if reused and not self._stopped and time.monotonic() < deadline:
                        continue  # the idle connection may be to an earlier process of the peer
                    return False
                try:
                    for _, here, length in ranges if answer == b"\1" else ():
                        if given_up():
                            raise InterruptedError("the read was given up; what the peer still sends is of no use")
                        _receive_into(connection, self._arena.view[here : here + length], deadline)
                except OSError:
                    connection.close()
                    return False
            finally:
                self._open.discard(connection)
            self._keep(address, connection)
            return answer == b"\1"
        return False

    def _connect(self, peer: Card, reused: bool) -> socket.socket | None:
        address = peer.socket_address
        if reused:
            with self._lock:
                idle = self._idle.get(address)
                return idle.pop() if idle else None
        if (local := same_machine.connected(peer.local_name, self._read_s)) is not None:
            return local
        host, _, port = address.rpartition(":")
        try:
            connection = socket.create_connection((host.strip("[]"), int(port)), timeout=self._read_s)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._own is None:
                return connection
            name = identity.node(peer.node).dns
            return self._own.client_context().wrap_socket(connection, server_hostname=name)
        except (OSError, ValueError):
            return None

    def _keep(self, address: str, connection: socket.socket) -> None:
        with self._lock:
            if not self._stopped:
                self._idle.setdefault(address, []).append(connection)
                return
        connection.close()

    async def forget(self, peer: Card) -> None:
        with self._lock:
            for connection in self._idle.pop(peer.socket_address, []):
                connection.close()

    async def stop(self) -> None:
        """Close all connections; running reads return false at once."""
        with self._lock:
            self._stopped = True
            idle = [c for kept in self._idle.values() for c in kept]
        for server in self._servers:
            with contextlib.suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)
            server.close()
        for connection in [*self._open, *idle]:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._pool.shutdown(wait=False)


def _receive(connection: socket.socket, length: int) -> bytes:
    data = bytearray(length)
    _receive_into(connection, memoryview(data))
    return bytes(data)


def _receive_into(connection: socket.socket, view: memoryview, deadline: float | None = None) -> None:
    """Fill `view`. Raises OSError when the stream ends, stalls, or `deadline` (monotonic) passes first."""
    while view:
        if deadline is not None:
            connection.settimeout(max(0.001, deadline - time.monotonic()))
        got = connection.recv_into(view)
        if not got:
            raise ConnectionError("the peer closed the connection")
        view = view[got:]


def _node_of(connection: ssl.SSLSocket) -> str:
    """The node that the other side's certificate names; empty: none."""
    names: Any = (connection.getpeercert() or {}).get("subjectAltName", ())
    who = identity_of(value for kind, value in names if kind == "DNS")
    return who.name if who is not None and who.role is Role.NODE else ""


def _listening(host: str, port: int) -> socket.socket:
    """`::` is every address of both versions, where the system can do that. Raises OSError."""
    if ":" not in host:
        return socket.create_server((host, port), backlog=64)
    both = host == "::" and socket.has_dualstack_ipv6()
    return socket.create_server((host, port), family=socket.AF_INET6, backlog=64, dualstack_ipv6=both)
