"""An erasure in an idle engine: the connector asks the sidecar for a step, until vLLM's cache has forgotten."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from upbeat_vllm.core import Core
from upbeat_vllm.scheduler_side import SchedulerSide
from upbeat_vllm.settings import Refused, Settings

from contracts.ids import SessionKey
from contracts.v1 import common_pb2
from contracts.v1 import kvstore_pb2 as pb
from contracts.warm_up import decode_warm_up, note_of
from tests.kvstore.conftest import Stack
from tests.vllm_plugin.test_sides import LOG, SHAPE

KEY = b"k" * 32


@pytest.fixture
def stack(make_stack: Callable[..., Stack]) -> Stack:
    made = make_stack(nodes=1)
    made.start(0)
    return made


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as s:
        s.bind(str(tmp_path / "wake.sock"))
        s.listen()
        s.settimeout(0.05)
        yield s


def messages(sidecar: socket.socket, for_s: float) -> list[bytes]:
    """What comes within so many seconds."""
    found, end = [], time.monotonic() + for_s
    while time.monotonic() < end:
        try:
            connection, _ = sidecar.accept()
        except TimeoutError:
            continue
        with connection, connection.makefile("rb") as file:
            found.append(file.read())
    return found


def heard(sidecar: socket.socket, for_s: float) -> int:
    """How often a step is asked for within so many seconds."""
    found = messages(sidecar, for_s)
    assert not any(found)
    return len(found)


def erased(stack: Stack, wake: Path | None) -> SchedulerSide:
    """A connector with a block of a session, which is erased: nothing of vLLM's runs."""
    side = SchedulerSide(Core(SHAPE, "m", 1), stack.address(0), secrets.token_hex(8), "vllm-test", 0, LOG, wake)
    end = time.monotonic() + 20
    while side._loop is None or side._link is None:
        assert time.monotonic() < end
        time.sleep(0.01)
    side.core.blocks.note([KEY], [7])
    session = common_pb2.Session(tenant="t", session_id="s")
    message = pb.StoreToWorker(erase=pb.Erase(sessions=[session], keys=[KEY]))
    side._loop.call_soon_threadsafe(side._hear, message)
    while not side.core.blocks.to_evict:
        assert time.monotonic() < end
        time.sleep(0.01)
    return side


def test_a_step_is_asked_for_until_the_block_is_evicted(stack: Stack, sidecar: socket.socket, tmp_path: Path) -> None:
    side = erased(stack, tmp_path / "wake.sock")
    try:
        assert heard(sidecar, 1.0) == 1
        assert heard(sidecar, 1.5) >= 1, "the first one may have been lost"
        side.core.blocks.to_evict.clear()  # a step has run
        heard(sidecar, 0.2)
        assert heard(sidecar, 1.5) == 0
    finally:
        side.close()


def test_an_engine_that_steps_by_itself_is_not_woken(stack: Stack, sidecar: socket.socket, tmp_path: Path) -> None:
    side = erased(stack, tmp_path / "wake.sock")
    try:
        side.core.blocks.to_evict.clear()
        assert heard(sidecar, 1.5) == 0
    finally:
        side.close()


@pytest.mark.parametrize("there", [False, True])
def test_without_a_sidecar_it_waits_for_the_next_step(stack: Stack, tmp_path: Path, there: bool) -> None:
    side = erased(stack, tmp_path / "nobody.sock" if there else None)
    try:
        time.sleep(0.5)
        assert side.core.blocks.to_evict == {7}
    finally:
        side.close()


def test_the_sidecar_hears_of_a_hinted_session_in_the_arena(
    stack: Stack, sidecar: socket.socket, tmp_path: Path
) -> None:
    name, wake = secrets.token_hex(8), tmp_path / "wake.sock"
    side = SchedulerSide(Core(SHAPE, "m", 1, warms=True), stack.address(0), name, "vllm-test", 0, LOG, wake)
    try:
        tokens = list(range(3 * SHAPE.chunk_tokens))
        offer = pb.PrefetchOffer(
            session=common_pb2.Session(tenant="t", session_id="s"),
            fingerprint=SHAPE.fingerprint,
            keys=[KEY, KEY],
            expires_s=9.0,
            note=note_of("salt", tokens),
        )
        end = time.monotonic() + 20
        while side._loop is None or side._link is None:
            assert time.monotonic() < end
            time.sleep(0.01)
        side._loop.call_soon_threadsafe(side._hear, pb.StoreToWorker(offer=offer))
        (message,) = messages(sidecar, 1.0)
        found = decode_warm_up(message)
        assert (found.session, found.cache_salt, found.expires_s) == (SessionKey("t", "s"), "salt", 9.0)
        assert list(found.tokens) == tokens[: 2 * SHAPE.chunk_tokens], "those of which the arena has the KV"
    finally:
        side.close()


@pytest.mark.parametrize("wake", [7, "relative.sock", ["/x"]])
def test_a_socket_is_named_by_its_path(wake: object) -> None:
    said = {"store": "127.0.0.1:1", "secret": "/x"}
    with pytest.raises(Refused, match=r"kv_connector_extra_config\.wake"):
        Settings.read(said | {"wake": wake}, "m")
    assert Settings.read(said | {"wake": "/run/wake.sock"}, "m").wake == Path("/run/wake.sock")
    assert Settings.read(said, "m").wake is None
