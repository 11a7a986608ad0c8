"""Processes with another cluster secret are refused by name, and whoever serves goes on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from blake3 import blake3

from contracts.cluster import log_key, secret_id
from contracts.errors import ConfigError
from contracts.exits import WRONG_USAGE
from contracts.identity import SCHEDULER
from contracts.kv import tenant_salt
from contracts.v1 import scheduler_pb2 as pb
from contracts.v1.kvstore_pb2_grpc import KvStoreServicer, add_KvStoreServicer_to_server
from contracts.v1.scheduler_pb2_grpc import SchedulerServicer, SchedulerStub, add_SchedulerServicer_to_server
from runtime import rpc, same_secret
from runtime.config_file import cluster_secret
from runtime.same_secret import GRACE_S, Membership, use_secret
from runtime.service import Tasks, serve
from storelink import fleet
from storelink.fleet import SecretDiffers
from storelink.link import StoreLink
from storelink.log import PythonLog
from tests.ports import free_ports

OURS, THEIRS = secret_id(b"a" * 32), secret_id(b"b" * 32)


class Played(SchedulerServicer):
    """Answers a unary and a streamed call."""

    async def Invalidate(self, request: Any, context: Any) -> pb.InvalidateReply:
        return pb.InvalidateReply(known=True)

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[pb.Fleet]:
        yield pb.Fleet(expected_nodes=3)

    async def Place(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        async for _ in requests:
            yield pb.PlaceAnswers()


class Process:
    """A server and a client that have these ids, in one process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.server_id, self.client_id = OURS, OURS
        monkeypatch.setattr(same_secret.SameSecret.__init__, "__defaults__", (lambda: self.server_id,))
        monkeypatch.setattr(fleet, "_read", lambda: self.client_id)


@pytest.fixture
async def calls(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Process, SchedulerStub]]:
    process, address = Process(monkeypatch), f"127.0.0.1:{free_ports(1)}"
    server, _ = rpc.server(address, ["upbeat.v1.Scheduler"])
    add_SchedulerServicer_to_server(Played(), server)
    await server.start()
    channel = rpc.channel(address, SCHEDULER)
    yield process, SchedulerStub(channel)  # type: ignore[no-untyped-call]
    await channel.close(None)
    await server.stop(0)


async def _ask(stub: Any) -> None:
    """One call of each kind."""
    await stub.Invalidate(pb.InvalidateRequest(), timeout=5)
    assert [fleet.expected_nodes async for fleet in stub.Watch(pb.WatchRequest(), timeout=5)] == [3]
    stream = stub.Place(timeout=5)
    await stream.write(pb.PlaceRequests())
    assert isinstance(await stream.read(), pb.PlaceAnswers)
    stream.cancel()


@pytest.mark.parametrize(("server", "client"), [(OURS, OURS), ("", THEIRS), (OURS, "")])
async def test_equal_secrets_and_those_that_nobody_knows_are_let_in(calls: Any, server: str, client: str) -> None:
    process, stub = calls
    process.server_id, process.client_id = server, client
    await _ask(stub)


async def test_every_call_with_another_secret_is_refused_naming_both_and_the_remedy_and_counted(calls: Any) -> None:
    process, stub = calls
    process.client_id = THEIRS
    before = same_secret._REFUSED._value.get()
    for _ in range(2):
        for call in (
            stub.Invalidate(pb.InvalidateRequest()),
            stub.Watch(pb.WatchRequest()).read(),
            stub.Place().read(),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as e:
                await call
            differs = fleet.refusal(e.value)
            assert differs is not None
            assert all(
                word in str(differs) for word in (OURS, THEIRS, "Scheduler on 127.0.0.1", "copy the file DATA/secret")
            )
    assert same_secret._REFUSED._value.get() == before + 6
    process.client_id = OURS
    await _ask(stub)


@pytest.mark.parametrize("said", ["", "0123", "g" * 16, "a" * 15 + "\n", "A" * 16, "a" * 4096])
def test_what_is_no_id_is_nobodys(said: str) -> None:
    assert fleet.said_id([("other", OURS), (fleet.HEADER, said)]) == "" and fleet.said_id(None) == ""


def test_the_id_reveals_nothing_that_other_keys_are_made_of() -> None:
    secret = b"a" * 32
    assert len(OURS) == 16 and OURS != THEIRS
    derived = [secret_id(secret), log_key(secret).hex(), tenant_salt(secret, "t").hex(), blake3(secret).hexdigest()]
    assert len({text[:16] for text in derived}) == 4 and secret.hex() not in "".join(derived)


# ---- who stops -------------------------------------------------------------------------------------------------
def refused() -> grpc.aio.AioRpcError:
    code, nothing = grpc.StatusCode.FAILED_PRECONDITION, grpc.aio.Metadata()
    return grpc.aio.AioRpcError(code, nothing, nothing, fleet.difference(OURS, "here", THEIRS))


def test_a_newcomer_stops_once_it_has_been_refused_for_a_while_and_others_go_on() -> None:
    newcomer = Membership()
    newcomer.failed(refused(), 10.0)
    newcomer.failed(refused(), 10.0 + GRACE_S / 2)
    with pytest.raises(SecretDiffers, match=THEIRS):
        newcomer.failed(refused(), 10.0 + GRACE_S)
    serving = Membership()
    serving.let_in()
    of_two = Membership()
    of_two.failed(refused(), 10.0)
    of_two.let_in()  # by the other scheduler
    for each in (serving, of_two):
        for now_s in range(100):
            each.failed(refused(), float(now_s))


def test_other_failures_stop_nobody() -> None:
    for code, details in (
        (grpc.StatusCode.UNAVAILABLE, str(refused().details())),
        (refused().code(), "something else"),
    ):
        member, error = Membership(), grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)
        for now_s in range(100):
            member.failed(error, float(now_s))


async def test_a_process_whose_secret_differs_ends_like_one_with_a_wrong_configuration() -> None:
    class Nothing:
        async def start(self) -> None: ...
        async def drain(self) -> None: ...
        async def stop(self) -> None: ...

    async def differs() -> None:
        raise SecretDiffers("x")

    tasks = Tasks()
    tasks.start(differs(), "link")
    assert await serve(Nothing(), tasks.failed, 5.0) == WRONG_USAGE


async def test_an_engine_whose_store_has_another_secret_is_told_and_one_that_was_attached_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Process(monkeypatch).client_id = THEIRS
    monkeypatch.setattr(fleet, "_read", lambda: THEIRS)
    address = f"127.0.0.1:{free_ports(1)}"
    server, _ = rpc.server(address, ["upbeat.v1.KvStore"])
    add_KvStoreServicer_to_server(KvStoreServicer(), server)
    await server.start()
    link = StoreLink(address, "worker", [], PythonLog(logging.getLogger()))
    with pytest.raises(SecretDiffers, match="KvStore on"):
        await asyncio.wait_for(link.run(), 10)
    link._welcomed = True
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(link.run(), 0.6)
    await server.stop(0)


# ---- whose id a process shows ----------------------------------------------------------------------------------
def test_a_node_makes_the_secret_and_others_wait_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "_read", fleet._read)
    use_secret(tmp_path, make=False)
    assert fleet.own_id() == "" and not (tmp_path / "secret").exists()
    (tmp_path / "secret").write_text("half")
    assert fleet.own_id() == "", "whatever is there meanwhile"
    with pytest.raises(ConfigError, match="64 hexadecimal digits"):
        use_secret(tmp_path, make=False)
    (tmp_path / "secret").unlink()
    made = secret_id(cluster_secret(tmp_path))
    use_secret(tmp_path, make=False)
    assert fleet.own_id() == made
    use_secret(tmp_path / "other", make=True)
    assert fleet.own_id() == secret_id(cluster_secret(tmp_path / "other")) != made
