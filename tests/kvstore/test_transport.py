"""Every way of reading a peer's arena keeps the same guarantees: sockets, NIXL over UCX, both beside each other, and
the fake."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import resource
import socket
import threading
import time
from pathlib import Path

import pytest

from kvstore.tiers import nixl, transport_nixl, transport_socket
from kvstore.tiers.arena import Arena
from kvstore.tiers.transport import Card, LeasedRanges, PeerRange
from kvstore.tiers.transport_auto import AutoTransport
from kvstore.tiers.transport_nixl import NixlTransport
from kvstore.tiers.transport_socket import SocketTransport
from runtime import handshakes
from storelink import credentials
from tests.certificates import certificates
from tests.kvstore.fake_tiers import FakeTransport
from tests.kvstore.tier_harness import MIB, arena

__all__ = ["arena"]

KINDS = ["socket", "socket over TCP", "nixl", "auto", "auto with a peer that NIXL does not reach", "fake"]
LIMIT_S = 30
_numbers = itertools.count()


class Pair:
    """An owner, whose arena is `owner_arena`, and a reader with an arena of its own."""

    def __init__(self, kind: str, owner_arena: Arena, directory: Path, free_ports) -> None:
        nixl.set_environment("lo")
        self.kind = kind
        self._free_ports = free_ports
        self.owner_arena = owner_arena
        self.arena = Arena(directory / "reader-arena", 4 * MIB)
        self.leases = LeasedRanges()
        self.address = f"127.0.0.1:{free_ports(1)}"
        self.reader = self._make(self.arena, LeasedRanges(), f"127.0.0.1:{free_ports(1)}")
        self.make_owner()

    def _make(self, arena: Arena, leases: LeasedRanges, address: str):
        if self.kind == "fake":
            return FakeTransport(arena, leases, address)
        by_nixl = NixlTransport(arena, leases, f"agent-{os.getpid()}-{time.monotonic_ns()}-{next(_numbers)}")
        by_socket = SocketTransport(arena, leases, address, address)
        return {"socket": by_socket, "nixl": by_nixl}.get(self.kind.split()[0]) or AutoTransport(by_nixl, by_socket)

    def make_owner(self) -> None:
        """A new life of the owner at the same address."""
        self.owner = self._make(self.owner_arena, self.leases, self.address)

    async def start_owner(self) -> None:
        await self.owner.start()
        card = Card(
            "node-0", f"i-{time.monotonic_ns()}", b"", self.owner_arena.address, self.owner_arena.size_bytes, ""
        )
        self.card = self.owner.fill(card)
        if "TCP" in self.kind:
            self.card = self.card._replace(local_name="")
        if "not reach" in self.kind:
            self.card = self.card._replace(nixl_metadata=b"nonsense")

    def lease(self, name: str, ranges: list[PeerRange]) -> None:
        self.leases.open(name, "reader")
        self.leases.add(name, [(there, length) for there, _, length in ranges])

    async def read(self, ranges: list[PeerRange], lease: str = "lease") -> bool:
        return await asyncio.wait_for(self.reader.read(self.card, lease, ranges), LIMIT_S)

    def assert_arrived(self, ranges: list[PeerRange]) -> None:
        for there, here, length in ranges:
            assert self.arena.view[here : here + length] == self.owner_arena.view[there : there + length]

    async def close(self) -> None:
        await self.reader.stop()
        await self.owner.stop()
        self.arena.close()


@pytest.fixture(params=KINDS)
async def pair(request, arena, tmp_path, free_ports):
    made = Pair(request.param, arena, tmp_path, free_ports)
    await made.reader.start()
    await made.start_owner()
    yield made
    await made.close()


def some_ranges(count: int = 40, length: int = 65_000) -> list[PeerRange]:
    return [(i * 70_000, ((i * 7) % 40) * 70_000, length) for i in range(count)]


async def test_a_read_that_was_given_up_answers_no_and_the_next_one_works(pair):
    ranges = [(i * 4096, i * 4096, 4096) for i in range(4)]
    pair.lease("lease", ranges)
    assert not await asyncio.wait_for(pair.reader.read(pair.card, "lease", ranges, lambda: True), LIMIT_S)
    assert await pair.read(ranges)
    pair.assert_arrived(ranges)


async def test_leased_ranges_arrive_byte_for_byte(pair):
    ranges = some_ranges()
    pair.lease("lease", ranges)
    for _ in range(2):
        pair.arena.view[:] = bytes(pair.arena.size_bytes)
        assert await pair.read(ranges)
        pair.assert_arrived(ranges)


async def test_nothing_beside_the_ranges_is_written(pair):
    ranges = [(100, 4096, 1), (MIB, 2 * MIB, MIB), (0, 8192, 4097)]
    pair.lease("lease", ranges)
    pair.arena.view[:] = b"\x5a" * pair.arena.size_bytes
    assert await pair.read(ranges)
    expected = bytearray(b"\x5a" * pair.arena.size_bytes)
    for there, here, length in ranges:
        expected[here : here + length] = pair.owner_arena.view[there : there + length]
    assert bytes(pair.arena.view) == expected


async def test_reads_at_the_same_time_do_not_mix(pair):
    groups = [[((g * 10 + i) * 40_000, (g * 10 + i) * 40_000, 40_000) for i in range(10)] for g in range(8)]
    pair.lease("lease", [r for group in groups for r in group])
    assert all(await asyncio.gather(*(pair.read(group) for group in groups)))
    assert pair.arena.view[: 80 * 40_000] == pair.owner_arena.view[: 80 * 40_000]


async def test_a_cancelled_read_harms_none_that_follows(pair):
    ranges = some_ranges()
    pair.lease("lease", ranges)
    reading = [asyncio.ensure_future(pair.reader.read(pair.card, "lease", ranges)) for _ in range(3)]
    await asyncio.sleep(0)
    for task in reading:
        task.cancel()
    await asyncio.gather(*reading, return_exceptions=True)
    assert await pair.read(ranges)
    pair.assert_arrived(ranges)


async def test_an_owner_that_stopped_is_no_answer_and_its_next_life_is_read_again(pair):
    ranges = some_ranges(4)
    pair.lease("lease", ranges)
    assert await pair.read(ranges)
    await pair.owner.stop()
    await asyncio.sleep(0.2)
    gone = pair.card
    if pair.kind not in ("nixl", "auto"):  # NIXL reads memory, for as long as there is any
        assert not await pair.read(ranges)
    await pair.reader.forget(gone)
    pair.make_owner()
    await pair.start_owner()
    pair.arena.view[:] = bytes(pair.arena.size_bytes)
    assert await pair.read(ranges)
    pair.assert_arrived(ranges)


async def test_a_peer_that_is_nowhere_is_no_answer_in_bounded_time(pair, free_ports):
    pair.card = pair.card._replace(
        socket_address=f"127.0.0.1:{free_ports(1)}", nixl_metadata=b"", instance="nobody", local_name="upbeat-nobody"
    )
    assert not await pair.read(some_ranges(2))
    pair.card = pair.card._replace(socket_address="nonsense", local_name="nonsense" * 100)
    assert not await pair.read(some_ranges(2))


async def test_forgetting_is_harmless_at_any_time(pair):
    ranges = some_ranges(4)
    pair.lease("lease", ranges)
    await pair.reader.forget(pair.card)
    assert await pair.read(ranges)
    reading = asyncio.ensure_future(pair.read(ranges))
    await pair.reader.forget(pair.card)
    await pair.reader.forget(pair.card)
    await reading
    assert await pair.read(ranges)
    pair.assert_arrived(ranges)


async def test_stopping_ends_the_reads_that_run_and_refuses_those_that_come(pair):
    ranges = some_ranges()
    pair.lease("lease", ranges)
    reading = [asyncio.ensure_future(pair.read(ranges)) for _ in range(8)]
    await asyncio.sleep(0)
    await pair.reader.stop()
    ended = await asyncio.gather(*reading)
    assert all(answer in (True, False) for answer in ended)
    assert not await pair.read(ranges)
    await pair.reader.stop()


# ---- guarantees of sockets only: they see which lease asks


@pytest.fixture
async def sockets(arena, tmp_path, free_ports):
    made = Pair("socket", arena, tmp_path, free_ports)
    await made.start_owner()
    yield made
    await made.close()


async def test_sockets_serve_exactly_what_is_leased_to_the_asker(sockets):
    sockets.lease("mine", [(4096, 0, 4096)])
    sockets.leases.open("other", "reader")
    assert await sockets.read([(4096, 0, 4096)], "mine")
    for lease, offset, length in (
        ("mine", 4096, 4095),
        ("mine", 0, 4096),
        ("other", 4096, 4096),
        ("unknown", 4096, 4096),
        ("mine", 1 << 60, 8),
    ):
        assert not await sockets.read([(offset, 0, length)], lease)
    assert await sockets.read([(4096, 0, 4096)], "mine"), "a refusal leaves the connection usable"
    sockets.leases.close("mine")
    assert not await sockets.read([(4096, 0, 4096)], "mine")


async def test_nonsense_on_the_socket_harms_nobody(sockets):
    host, port = sockets.address.split(":")
    for nonsense in (
        b"GET / HTTP/1.1\r\n\r\n",
        b"UPBT" + b"\xff" * 6,
        b"UPBT\x05\x00\x01\x00\x00\x00\xff\xfe\xfd\xfc\xfb" + b"\0" * 16,
    ):
        with contextlib.suppress(ConnectionError):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(nonsense)
            assert await asyncio.wait_for(reader.read(), 10) == b""
            writer.close()
    sockets.lease("lease", [(0, 0, 4096)])
    assert await sockets.read([(0, 0, 4096)])


async def test_peers_are_served_again_once_there_are_descriptors(sockets, monkeypatch):
    monkeypatch.setattr(transport_socket, "_ACCEPT_PAUSE_S", 0.01)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    sockets.lease("lease", [(0, 0, 4096)])
    host, port = sockets.address.split(":")
    used = max(int(name) for name in os.listdir("/proc/self/fd")) + 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 1, hard))
    try:
        one = socket.create_connection((host, int(port)))  # takes the last descriptor: accept has none
        await asyncio.sleep(0.2)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    one.close()
    assert await sockets.read([(0, 0, 4096)])


async def test_those_without_a_certificate_hold_few_threads_and_only_for_a_moment(
    arena, tmp_path, free_ports, monkeypatch
):
    monkeypatch.setattr(transport_socket, "_HANDSHAKES", 3)
    monkeypatch.setattr(transport_socket, "_HANDSHAKE_S", 4.0)  # all connect before the first are given up
    tried = handshakes._REFUSED._value.get()
    credentials.use(certificates(tmp_path / "certificates", 2) / "node-0")
    try:
        pair = Pair("socket over TCP", arena, tmp_path, free_ports)
        await pair.start_owner()
        host, port = pair.address.split(":")
        silent = [socket.create_connection((host, int(port)), timeout=10) for _ in range(20)]
        assert all([await asyncio.to_thread(_ends, one) for one in silent])
        assert handshakes._REFUSED._value.get() == tried + 3, "the others were closed without a thread"
        pair.leases.open("lease", "node-0")
        pair.leases.add("lease", [(0, 4096)])
        assert await pair.read([(0, 0, 4096)])
        for one in silent:
            one.close()
        await pair.close()
    finally:
        credentials.use(None)


def _ends(connection: socket.socket) -> bool:
    with contextlib.suppress(ConnectionError):
        return connection.recv(1) == b""
    return True


@pytest.mark.parametrize("said", [b"", b"\1", b"\1" + b"x" * 5000], ids=["nothing", "yes", "half"])
@pytest.mark.parametrize("ends", ["hangs", "closes", "trickles"])
async def test_a_peer_that_stops_in_the_middle_is_given_up(sockets, said, ends):
    """What it sent stays in the slots; the caller drops them."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        over = threading.Event()

        def serve() -> None:
            connection, _ = server.accept()
            with connection, contextlib.suppress(OSError):
                connection.recv(1 << 16)
                connection.sendall(said)
                while ends != "closes" and not over.wait(0.5):
                    if ends == "trickles" and said:
                        connection.sendall(b"x")

        threading.Thread(target=serve, daemon=True).start()
        sockets.reader = SocketTransport(sockets.arena, LeasedRanges(), "", "", read_s=1.0)
        sockets.card = sockets.card._replace(socket_address=f"127.0.0.1:{server.getsockname()[1]}", local_name="")
        assert not await sockets.read([(0, 0, 100_000)])
        over.set()


async def test_stopping_ends_a_read_from_a_peer_that_hangs(sockets):
    with socket.create_server(("127.0.0.1", 0)) as server:
        sockets.card = sockets.card._replace(socket_address=f"127.0.0.1:{server.getsockname()[1]}", local_name="")
        reading = asyncio.ensure_future(sockets.read([(0, 0, 4096)]))
        connection, _ = await asyncio.to_thread(server.accept)
        await asyncio.to_thread(connection.recv, 1)
        await sockets.reader.stop()
        assert await reading is False
        connection.close()


# ---- what only the fake can do


async def test_the_fake_is_cut_and_held_when_told_to(arena, tmp_path, free_ports):
    pair = Pair("fake", arena, tmp_path, free_ports)
    await pair.start_owner()
    pair.lease("lease", some_ranges(2))
    pair.reader.cut = True
    assert not await pair.read(some_ranges(2))
    pair.reader.cut = False
    pair.reader.hold.clear()
    reading = asyncio.ensure_future(pair.read(some_ranges(2)))
    await asyncio.sleep(0.05)
    assert not reading.done()
    pair.reader.hold.set()
    assert await reading
    await pair.close()


async def test_a_start_that_takes_too_long_is_given_up_and_leaves_no_thread(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = threading.Event()
    monkeypatch.setattr(transport_nixl, "_START_S", 0.05)
    monkeypatch.setattr(nixl, "load", loaded.wait)
    made = NixlTransport(arena, LeasedRanges(), "slow")
    with pytest.raises(TimeoutError):
        await made.start()
    (thread,) = (t for t in threading.enumerate() if t.name == "nixl slow")
    loaded.set()
    await asyncio.to_thread(thread.join, 10)
    assert not thread.is_alive() and await made.read(Card("a", "i", b"", 0, 0, ""), "l", []) is False


async def test_a_store_that_listens_on_every_address_is_reached_over_both_versions(arena: Arena, free_ports) -> None:
    port = free_ports(1)
    owner = SocketTransport(arena, LeasedRanges(), f"[::]:{port}", f"[::1]:{port}")
    await owner.start()
    try:
        for host in ("127.0.0.1", "::1") if socket.has_dualstack_ipv6() else ("::1",):
            socket.create_connection((host, port), timeout=10).close()
    finally:
        await owner.stop()
