"""compose.yaml brought up for real: the image is built, a chat is answered, a container dies, nothing can be written.

make test-slow ARGS="tests/deploy/test_compose_up.py -s"      prints the seconds of build and first token
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.deploy.podman import IMAGE, ROOT, Podman, need
from tests.e2e.chat import Chat, script

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]

KEY = secrets.token_hex(16)
SERVICES = ("scheduler", "kvstore-0", "kvstore-1", "worker-0", "worker-1", "gateway")


class Stack:
    """The containers of compose.yaml, under a project name of their own."""

    def __init__(self, podman: Podman, scratch: Path) -> None:
        self.podman, self._project = podman, f"upbeat-test-{os.getpid()}"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        secret = scratch / "secrets" / "gateway.yaml"
        secret.parent.mkdir(mode=0o700)
        secret.write_text(f"gateway: {{api_keys: [{{key: {KEY}}}]}}\n")
        self._environment = podman.environment | {
            "UPBEAT_PORT": str(port),
            "UPBEAT_GATEWAY_SECRET": str(secret),
            "UPBEAT_IMAGE": IMAGE,
        }
        self.url = f"http://127.0.0.1:{port}"

    def compose(self, *arguments: str) -> None:
        """Run podman-compose with compose.yaml."""
        program = Path(sys.executable).with_name("podman-compose")
        done = subprocess.run(
            [str(program), "--project-name", self._project, "--file", str(ROOT / "compose.yaml"), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=600,
            env=self._environment,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-3000:]

    def name(self, service: str) -> str:
        """A service's container."""
        return f"{self._project}_{service}_1"

    def inside(self, service: str, script: str) -> str:
        """What a shell in the container prints, errors included."""
        return self.podman.run("exec", self.name(service), "sh", "-c", script, check=False)

    def serving(self) -> int:
        """How many nodes serve; 0 while the gateway does not answer."""
        try:
            return int(httpx.get(f"{self.url}/ready", timeout=10).json()["nodes_serving"])
        except httpx.HTTPError:
            return 0

    def wait_for(self, nodes: int, timeout_s: float = 300.0) -> None:
        """Wait until so many nodes serve."""
        end = time.monotonic() + timeout_s
        while self.serving() != nodes:
            if time.monotonic() > end:
                logs = "\n".join(self.podman.run("logs", "--tail", "5", self.name(each)) for each in SERVICES)
                raise AssertionError(f"{self.serving()} nodes serve, not {nodes}: {logs}")
            time.sleep(0.5)

    def chat(self) -> Chat:
        """A new conversation."""
        return Chat(self.url, session_id=f"s-{secrets.token_hex(4)}", api_key=KEY, max_tokens=8)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    need()
    scratch = tmp_path_factory.mktemp("compose")
    podman = Podman(scratch)
    podman.make_base()
    built_s = podman.build()
    stack = Stack(podman, scratch)
    began = time.monotonic()
    try:
        stack.compose("up", "--detach", "--no-build")
        up_s = time.monotonic() - began
        stack.wait_for(2)
        stack.chat().say("Hello", timeout_s=120)
        answered_s = time.monotonic() - began
        print(f"\nbuild {built_s:.0f} s, containers up {up_s:.0f} s, first answer {answered_s:.0f} s after `up`")
        yield stack
    finally:
        stack.compose("down", "--volumes", "--timeout", "10")
    left = podman.run("ps", "--all", "--format", "{{.Names}}") + podman.run("volume", "ls", "--quiet")
    assert stack.name("").rstrip("_1") not in left


def test_a_chat_is_answered_and_a_hint_accepted(stack: Stack) -> None:
    chat, (told, asked) = stack.chat(), script(seed=1, turns=2)
    first = chat.say(told, timeout_s=120)
    assert first.text
    hint = httpx.post(
        f"{stack.url}/v1/advisory", json={"session_id": chat.session_id}, headers={"authorization": f"Bearer {KEY}"}
    )
    assert hint.status_code == 202 and hint.json()["status"] == "accepted"
    assert chat.say(asked, node=first.node, timeout_s=120).cached_tokens > 0
    assert httpx.get(f"{stack.url}/v1/models").status_code == 401, "without the secret's key"


@pytest.mark.parametrize("service", SERVICES)
def test_a_container_can_change_nothing_and_has_no_rights(stack: Stack, service: str) -> None:
    status = dict(
        line.split(":\t", 1) for line in stack.inside(service, "cat /proc/1/status").splitlines() if ":\t" in line
    )
    for kind in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        assert int(status[kind], 16) == 0, f"{kind} is {status[kind]}"
    assert status["NoNewPrivs"] == "1" and status["Seccomp"] == "2"
    assert set(status["Uid"].split()) == {"10001"}
    for path in ("/", "/opt/upbeat", "/opt/upbeat/bin", "/etc", "/usr/bin"):
        assert "Read-only file system" in stack.inside(service, f"touch {path}/x"), path
    tried = stack.inside(service, "cp /bin/true /tmp/x && echo copied; /tmp/x || echo refused; rm /tmp/x")
    assert "copied" in tried and "refused" in tried, "files in /tmp are not run"
    assert "ead-only" in stack.inside(service, "touch /certs/x")
    assert set(stack.inside(service, "ls -A /certs").split()) == {"ca.crt", "tls.crt", "tls.key"}, "its own identity"


@pytest.mark.parametrize("service", SERVICES)
def test_only_the_gateway_has_the_key_and_none_has_it_in_its_environment(stack: Stack, service: str) -> None:
    environment = stack.inside(service, "cat /proc/1/environ")
    assert "UPBEAT__TLS__DIRECTORY=/certs" in environment, "it was read"
    assert KEY not in environment and KEY not in stack.podman.run("inspect", stack.name(service))
    assert (KEY in stack.inside(service, "cat /run/secrets/gateway.yaml")) == (service == "gateway")


@pytest.mark.parametrize("service", SERVICES)
def test_memory_and_processes_are_limited(stack: Stack, service: str) -> None:
    (found,) = json.loads(stack.podman.run("inspect", stack.name(service)))
    host = found["HostConfig"]
    assert 0 < host["Memory"] <= 6 << 30 and 0 < host["PidsLimit"] <= 1024 and 0 < host["NanoCpus"] <= 2e9


def test_only_the_gateway_is_published_and_only_its_network_leads_out(stack: Stack) -> None:
    for service in SERVICES:
        (found,) = json.loads(stack.podman.run("inspect", stack.name(service)))
        published = [each for each in found["NetworkSettings"]["Ports"].values() if each]
        routes = [line.split()[1] for line in stack.inside(service, "cat /proc/net/route").splitlines()[1:]]
        if service == "gateway":
            assert [[each["HostIp"] for each in ports] for ports in published] == [["127.0.0.1"]]
        else:
            assert not published and "00000000" not in routes, f"{service} has a way out"


def test_workers_compile_their_kernels_for_this_processor(stack: Stack) -> None:
    for worker in ("worker-0", "worker-1"):
        assert "/cache/upbeat/kernels/cpu-" in stack.inside(worker, "ls /cache/upbeat/kernels/*.so")


@pytest.mark.parametrize("service", SERVICES)
def test_health_checks_pass(stack: Stack, service: str) -> None:
    tries = (stack.podman.run("healthcheck", "run", stack.name(service), check=False) for _ in range(3))
    assert any("unhealthy" not in said for said in tries)


def test_the_fleet_goes_on_when_a_worker_dies_and_it_comes_back(stack: Stack) -> None:
    chat = stack.chat()
    first = chat.say("My name is Ada.", timeout_s=120)
    dying = f"worker-{first.node.removeprefix('node-')}"
    (found,) = json.loads(stack.podman.run("inspect", stack.name(dying)))
    os.kill(found["State"]["Pid"], signal.SIGKILL)
    again = chat.say("What is my name?", timeout_s=120)
    assert again.text and again.node != first.node
    assert found["HostConfig"]["RestartPolicy"]["Name"] == "unless-stopped"
    # Without systemd, podman 4 does not start containers with health checks again by itself.
    stack.podman.run("start", stack.name(dying))
    stack.wait_for(2)
    assert chat.say("And now?", timeout_s=120).text
