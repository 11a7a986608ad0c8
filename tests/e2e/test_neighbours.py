"""A fleet with certificates among neighbours that have none, another's, or one of another role."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import ssl
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from cli.authority import Authority, everybody
from contracts import identity
from contracts.identity import GATEWAY, OPERATOR, SCHEDULER, Identity
from contracts.v1 import common_pb2, kvstore_pb2, scheduler_pb2
from contracts.v1.kvstore_pb2_grpc import KvStoreStub
from contracts.v1.scheduler_pb2_grpc import SchedulerStub
from contracts.v1.worker_pb2_grpc import WorkerStub
from loadtest.stack import Stack
from runtime.config import Config
from runtime.config_file import load_config
from scheduler.metrics import metrics_port
from storelink.arena_sharing import arenas_of
from storelink.channel import blocking_channel
from storelink.credentials import Credentials
from tests.certificates import certificates
from tests.cli.upbeat_here import upbeat
from tests.e2e.chat import ALWAYS_LOAD, Chat, script, uncached

pytestmark = [pytest.mark.stack, pytest.mark.timeout(280)]
MODEL = Path(__file__).parents[2] / "models" / "demo"
SMALL = {"hbm_gib": 0.25, "dram_gib": 0.25}
NODE_0, NODE_1 = identity.node("node-0"), identity.node("node-1")


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return certificates(tmp_path_factory.mktemp("fleet") / "certs", 2)


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates with the same names, of another authority."""
    return certificates(tmp_path_factory.mktemp("others") / "certs", 2)


@pytest.fixture(scope="module")
def stack(fleet: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    settings = {**ALWAYS_LOAD, "tls": {"directory": str(fleet)}}
    with Stack(model=MODEL, nodes=2, directory=tmp_path_factory.mktemp("stack"), settings=settings, **SMALL) as made:
        yield made


@pytest.fixture(scope="module")
def config(stack: Stack) -> Config:
    return load_config(stack.directory / "run" / "config.yaml")


def calls(config: Config, directory: Path | None, who: Identity | None, method: str, *requests: Any) -> str:
    """The name of the status that a call ends with. requests: several are a stream's."""
    service, _, name = method.partition(".")
    stub, address, peer = {
        "Scheduler": (SchedulerStub, config.scheduler_addresses[0], SCHEDULER),
        "KvStore": (KvStoreStub, config.node(0).store_address, NODE_0),
        "Worker": (WorkerStub, config.device(0, 0).worker_address, NODE_0),
    }[service]
    own = Credentials(directory / str(who)) if directory is not None else None
    with blocking_channel(address, peer, own) as channel:
        call = getattr(stub(channel), name)
        try:
            answer = call(iter(requests) if name in STREAMS else requests[0], timeout=10)
            if hasattr(answer, "__next__"):
                next(answer)
        except grpc.RpcError as e:
            return str(e.code().name)
        except StopIteration:
            pass
        return "OK"


STREAMS = {"StoreReports", "WorkerReports", "Attach", "Place", "Stream"}
SESSION = common_pb2.Session(tenant="default", session_id="seen")


def hello(node: str) -> Any:
    return scheduler_pb2.StoreReport(hello=scheduler_pb2.StoreHello(node=node, address="127.0.0.1:9", instance="i"))


RESIDENCY = kvstore_pb2.ResidencyRequest(session=SESSION)
LEASE = kvstore_pb2.PeerLeaseRequest(lease_id="i/1", reader="node-1")
ATTACH = kvstore_pb2.WorkerToStore(hello=kvstore_pb2.AttachHello(worker_id="node-0"))
QUESTIONS: dict[str, Any] = {
    "Scheduler.Metrics": scheduler_pb2.MetricsRequest(),
    "Scheduler.ListSessions": scheduler_pb2.ListSessionsRequest(),
    "Scheduler.StoreReports": hello("node-0"),
    "KvStore.Residency": RESIDENCY,
    "KvStore.PeerLease": LEASE,
    "KvStore.Attach": ATTACH,
    "Worker.Stream": None,
}


def test_a_conversation_goes_on_anywhere_and_its_cache_comes_over_tls(stack: Stack) -> None:
    chat = Chat(stack.url, "moves")
    answers = [chat.say(line, f"node-{turn % 2}") for turn, line in enumerate(script(1)[:4])]
    assert all(a.cached_tokens >= 64 for a in answers[1:])
    assert [a.text for a in answers] == uncached(stack.url, script(1)[:4])


@pytest.mark.parametrize("method", QUESTIONS)
def test_who_has_no_certificate_of_this_fleet_gets_nowhere(
    method: str, config: Config, stack: Stack, others: Path
) -> None:
    requests = [] if QUESTIONS[method] is None else [QUESTIONS[method]]
    assert calls(config, None, None, method, *requests) == "UNAVAILABLE"
    for who in (NODE_0, GATEWAY, OPERATOR):
        assert calls(config, others, who, method, *requests) == "UNAVAILABLE"


@pytest.mark.parametrize(
    ("who", "method", "request_"),
    [
        (NODE_1, "Scheduler.StoreReports", hello("node-0")),
        (NODE_1, "Scheduler.ListSessions", scheduler_pb2.ListSessionsRequest()),
        (GATEWAY, "Scheduler.StoreReports", hello("node-0")),
        (OPERATOR, "Scheduler.StoreReports", hello("node-0")),
        (NODE_1, "KvStore.Attach", ATTACH),
        (GATEWAY, "KvStore.Attach", ATTACH),
        (SCHEDULER, "KvStore.Attach", ATTACH),
        (GATEWAY, "KvStore.Residency", RESIDENCY),
        (NODE_1, "KvStore.Residency", RESIDENCY),
        (GATEWAY, "KvStore.PeerLease", LEASE),
        (NODE_1, "KvStore.PeerLease", kvstore_pb2.PeerLeaseRequest(lease_id="i/1", reader="node-0")),
        (NODE_1, "KvStore.PeerIntroduce", kvstore_pb2.PeerCard(node="node-0")),
        (NODE_1, "KvStore.Flush", kvstore_pb2.FlushRequest(timeout_s=1)),
        (OPERATOR, "Worker.Stream", None),
        (NODE_1, "Worker.Stream", None),
    ],
)
def test_each_may_do_what_its_role_and_name_allow(
    who: Identity, method: str, request_: Any, config: Config, fleet: Path
) -> None:
    requests = [] if request_ is None else [request_]
    assert calls(config, fleet, who, method, *requests) == "PERMISSION_DENIED"


def test_only_a_gateways_fine_tuning_has_to_stay_in_its_folder(config: Config, stack: Stack, fleet: Path) -> None:
    settings = scheduler_pb2.FinetuneSettings(
        rank=8, alpha=16, learning_rate=1e-4, epochs=1, batch_size=1, max_tokens=64, checkpoint_every=9
    )
    job = scheduler_pb2.FinetuneJob(
        id="ftjob-00000001", suffix="a", model="nobodys", data="/d.jsonl", out="/etc/out", settings=settings
    )
    told = {}
    for who in (GATEWAY, OPERATOR):
        own = Credentials(fleet / str(who))
        with blocking_channel(config.scheduler_addresses[0], SCHEDULER, own) as channel:
            with pytest.raises(grpc.RpcError) as refused:
                SchedulerStub(channel).SubmitFinetune(job, timeout=10)
            told[who] = refused.value.details()
    assert "a gateway's job writes in" in told[GATEWAY]
    assert "no node serves the model" in told[OPERATOR]


def test_a_refusal_is_counted_and_logged_once_and_nobodys_place_is_taken(
    stack: Stack, config: Config, fleet: Path
) -> None:
    before = nodes(stack)
    for _ in range(3):
        assert calls(config, fleet, NODE_1, "Scheduler.StoreReports", hello("node-0")) == "PERMISSION_DENIED"
    assert nodes(stack) == before
    log = (stack.directory / "run" / "logs" / "scheduler.log").read_text().splitlines()
    assert sum("call refused" in line and "StoreReports" in line and "for node-0" in line for line in log) == 1
    port = metrics_port(config, int(config.scheduler_addresses[0].rpartition(":")[2]))
    assert port is not None
    counted = metrics(port, Credentials(fleet / "operator").client_context(), SCHEDULER)
    line = next(line for line in counted.splitlines() if 'upbeat_calls_refused_total{method="StoreReports"}' in line)
    assert float(line.split()[-1]) >= 3


def test_a_caller_without_a_certificate_is_counted_and_logged(stack: Stack, config: Config, fleet: Path) -> None:
    port = config.node(0).store_metrics_port
    assert calls(config, None, None, "KvStore.PeerLease", LEASE) == "UNAVAILABLE"
    deadline = time.monotonic() + 60
    while not re.search(
        r"^upbeat_handshakes_refused_total [1-9]",
        metrics(port, Credentials(fleet / "operator").client_context(), NODE_0),
        re.M,
    ):
        assert time.monotonic() < deadline
        time.sleep(0.5)
    log = (stack.directory / "run" / "logs" / "kvstore-0.log").read_text()
    assert "connections without a certificate of this fleet" in log


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_user_of_the_machine_reads_no_file_of_a_stack(stack: Stack, config: Config) -> None:
    Chat(stack.url, "private").say(script(1)[0])
    deadline = time.monotonic() + 60
    while not any((stack.data / "blob").rglob("private")):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    stack.directory.chmod(0o755)  # a temporary directory would hide all of it
    arenas = [path for node in range(2) for path in arenas_of(config.node(node).arena_stem)]
    places = [*stack.data.rglob("*"), *stack.run_dir.rglob("*"), *arenas]
    assert len(arenas) == 2
    open_to_all = []
    os.seteuid(65_534)
    try:
        for path in places:
            with contextlib.suppress(OSError):
                (os.listdir if path.is_dir() else Path.open)(path)
                open_to_all.append(path)
    finally:
        os.seteuid(0)
    assert not open_to_all


def nodes(stack: Stack) -> list[tuple[str, str]]:
    told = httpx.get(f"{stack.url}/v1/fleet", timeout=10).json()["nodes"]
    return [(n["node"], n["worker_address"]) for n in told]


def metrics(port: int, context: ssl.SSLContext | None, who: Identity) -> str:
    with socket.create_connection(("127.0.0.1", port), timeout=10) as plain:
        connection = plain if context is None else context.wrap_socket(plain, server_hostname=who.dns)
        connection.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        answer = b""
        while block := connection.recv(65536):
            answer += block
        return answer.decode()


def test_metrics_are_for_those_with_a_certificate(config: Config, fleet: Path, others: Path) -> None:
    port = config.device(0, 0).metrics_port
    assert "upbeat_" in metrics(port, Credentials(fleet / "operator").client_context(), NODE_0)
    for context in (None, Credentials(others / "operator").client_context()):
        assert not read(lambda context=context: metrics(port, context, NODE_0))


def test_the_socket_transport_reads_for_its_leases_node_only(config: Config, fleet: Path, others: Path) -> None:
    host, _, port = config.node(0).socket_address.rpartition(":")
    question = struct.pack("<4sHI", b"UPBT", 3, 1) + b"i/1" + struct.pack("<QQ", 0, 4096)

    def answer(context: ssl.SSLContext | None) -> bytes:
        with socket.create_connection((host, int(port)), timeout=10) as plain:
            reads = plain if context is None else context.wrap_socket(plain, server_hostname=NODE_0.dns)
            reads.sendall(question)
            return reads.recv(4097)

    assert answer(Credentials(fleet / "node-1").client_context()) == b"\0", "it has no such lease"
    assert not read(lambda: answer(None))
    assert not read(lambda: answer(Credentials(others / "node-1").client_context()))


def read(ask: Callable[[], str | bytes]) -> str | bytes:
    """What is answered; nothing, if the connection is ended."""
    try:
        return ask()
    except OSError:
        return b""


def test_new_certificates_are_taken_without_a_restart(stack: Stack, config: Config, fleet: Path) -> None:
    authority = Authority(fleet)
    before = shown(config, fleet)
    for who in everybody(2):
        authority.issue(who, 1)
    deadline = time.monotonic() + 20
    while shown(config, fleet) == before:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    chat = Chat(stack.url, "renewed")
    assert [chat.say(line, f"node-{turn % 2}").text for turn, line in enumerate(script(2)[:2])]
    assert calls(config, fleet, OPERATOR, "Scheduler.Metrics", scheduler_pb2.MetricsRequest()) == "OK"


def shown(config: Config, fleet: Path) -> bytes:
    """The certificate that the first scheduler shows."""
    host, _, port = config.scheduler_addresses[0].rpartition(":")
    context = Credentials(fleet / "operator").client_context()
    context.set_alpn_protocols(["h2"])
    with (
        socket.create_connection((host, int(port)), timeout=10) as plain,
        context.wrap_socket(plain, server_hostname=SCHEDULER.dns) as connection,
    ):
        return connection.getpeercert(binary_form=True) or b""


def test_the_command_line_shows_its_certificate(config: Config, fleet: Path) -> None:
    def probe(address: str, who: str, directory: Path) -> int:
        return upbeat("probe", f"grpc://{address}", who, UPBEAT__TLS__DIRECTORY=str(directory)).returncode

    assert probe(config.scheduler_addresses[0], "scheduler", fleet) == 0
    assert probe(config.node(0).store_address, "node-0", fleet) == 0
    assert probe(config.node(0).store_address, "node-1", fleet) == 1, "another answers"
