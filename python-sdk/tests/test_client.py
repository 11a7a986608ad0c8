"""The clients: hints arrive, the host never waits and never fails, whatever the server does."""

from __future__ import annotations

import logging
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from scripted_server import ScriptedServer, serving

import upbeat
from upbeat import AdvisoryClient, AsyncAdvisoryClient, ConfigurationError
from upbeat.hints import Advisory
from upbeat.sender import Sender
from upbeat.transport import Answer, HttpTransport, Transport, Verdict, verdict_of

SOURCES = Path(upbeat.__file__).parents[1]


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with serving() as made:
        yield made


class HeldTransport:
    """Posts nothing until `go` is set."""

    def __init__(self, answers: list[Answer] | None = None) -> None:
        self.go, self.began, self.posted = threading.Event(), threading.Event(), []
        self._answers = answers or []

    def post(self, path: str, body: dict[str, Any]) -> Answer:
        self.began.set()
        assert self.go.wait(30)
        self.posted.append((path, body))
        return self._answers.pop(0) if self._answers else Answer(Verdict.ARRIVED)

    def close(self) -> None: ...


def sender(transport: Transport, queue_limit: int = 1024, idle_s: float = 20.0) -> Sender:
    return Sender(lambda: transport, queue_limit, 0.0, idle_s=idle_s)


def test_hints_arrive_with_all_their_fields_and_the_key(server: ScriptedServer) -> None:
    with AdvisoryClient(f"{server.url}/v1/", "secret") as client:
        client.advise("chat:1", model_id="m", expected_arrival=9.0, ordered=True, priority=-4, ttl_s=7)
        assert client.flush()
        client.invalidate("chat:1")
        client.invalidate(advisory_id="adv-1")
        hop = client.hop("team", "qa", "job7", priority=2)
        assert client.flush()
    first = server.events[0].body
    assert 8.0 < first.pop("expected_arrival") <= 9.0, "less by what it waited"
    assert first == {"session_id": "chat:1", "model_id": "m", "ordered": True, "priority": -4, "ttl_s": 7}
    assert server.order()[1:] == [("invalidate", "chat:1"), ("invalidate", None), ("advise", "job7:qa")]
    assert {e.headers["authorization"] for e in server.events} == {"Bearer secret"}
    assert hop.headers["X-Session-Id"] == "job7:qa"


def test_what_waits_together_travels_together() -> None:
    transport = HeldTransport()
    sends = sender(transport)
    sends.put(
        Advisory("first"),
    )
    assert transport.began.wait(10)
    for i in range(300):
        sends.put(Advisory(f"s{i}"))
    transport.go.set()
    assert sends.flush(10)
    assert [len(body.get("advisories", [body])) for _, body in transport.posted] == [1, 256, 44]
    assert sends.counters == upbeat.Counters(sent=301)


def test_a_server_that_hangs_holds_nobody_up_and_the_oldest_hints_give_way() -> None:
    transport = HeldTransport()
    sends = sender(transport, queue_limit=10)
    sends.put(Advisory("first"))
    assert transport.began.wait(10)
    for i in range(5000):
        sends.put(Advisory(f"s{i}"))
    assert sends.counters.dropped == 4990 and sends.counters.waiting == 11
    assert not sends.flush(0.01)
    transport.go.set()
    assert sends.flush(10) and sends.counters.sent == 11


def test_wrong_arguments_are_counted_and_logged_once(server: ScriptedServer, caplog: pytest.LogCaptureFixture) -> None:
    wrong: Any = object()
    with AdvisoryClient(server.url) as client:
        for _ in range(3):
            client.advise("../x")
            client.advise(wrong)
            client.advise("ok", priority=wrong)
            client.invalidate()
            client.hop("team", wrong, "job7")
        with client.session(wrong, colour="red"):
            pass
        assert client.flush() and client.counters.invalid == 17
    messages = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(messages) == 4 and all("further ones are only counted" in m for m in messages)
    assert not any("0x" in m for m in messages), "nothing of what was given but its type"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({}, "base_url is missing"),
        ({"base_url": ""}, "base_url is missing"),
        ({"base_url": 8080}, "base_url must be a string"),
        ({"base_url": "127.0.0.1:8080"}, "base_url"),
        ({"base_url": "ftp://x"}, "base_url"),
        ({"base_url": "http://"}, "base_url"),
        ({"base_url": "http://x:99999"}, "base_url"),
        ({"base_url": "http://user:word@x"}, "give the key as api_key"),
        ({"base_url": "http://x/?a=1"}, "base_url"),
        ({"base_url": "http://x/ y"}, "base_url"),
        ({"base_url": "http://x", "api_key": "a\r\nb"}, "api_key"),
        ({"base_url": "http://x", "queue_limit": 0}, "queue_limit"),
        ({"base_url": "http://x", "timeout_s": "soon"}, "timeout_s"),
        ({"base_url": "http://x", "exit_timeout_s": -1}, "exit_timeout_s"),
    ],
)
@pytest.mark.parametrize("kind", [AdvisoryClient, AsyncAdvisoryClient])
def test_a_client_that_cannot_work_is_refused_naming_the_argument(
    kind: Any, arguments: dict[str, Any], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("UPBEAT_BASE_URL", raising=False)
    with pytest.raises(ConfigurationError, match=named):
        kind(**arguments)


def test_the_environment_names_the_server(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UPBEAT_BASE_URL", f"{server.url}/v1")
    monkeypatch.setenv("UPBEAT_API_KEY", "from-outside")
    with AdvisoryClient() as client:
        client.advise("a")
        assert client.flush()
    assert server.events[0].headers["authorization"] == "Bearer from-outside"


@pytest.mark.parametrize(
    ("status", "headers"), [(429, {"Retry-After": "0.1"}), (503, {}), (500, {"Retry-After": "tomorrow"})]
)
def test_a_busy_server_is_asked_again_later(server: ScriptedServer, status: int, headers: dict[str, str]) -> None:
    answers: list[Any] = [(status, headers), (status, headers)]
    server.refuse = lambda: answers.pop(0) if answers else None
    with AdvisoryClient(server.url) as client:
        client.advise("a")
        assert client.flush(20) and server.posts == 3
        assert client.counters == upbeat.Counters(sent=1)


def test_retry_after_is_told_to_the_backoff(server: ScriptedServer) -> None:
    server.refuse = lambda: (429, {"Retry-After": "17"})
    answer = HttpTransport(server.url, None, 5.0).post("/v1/advisory", {"session_id": "a"})
    assert answer == Answer(Verdict.LATER, "HTTP 429 as the test wants it", 17.0)


@pytest.mark.parametrize("status", [400, 401, 403, 404, 413])
def test_a_refusal_is_not_repeated_and_said_once(
    server: ScriptedServer, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    server.refuse = lambda: (status, {})
    with AdvisoryClient(server.url) as client:
        client.advise("a")
        assert client.flush() and client.counters == upbeat.Counters(failed=1) and server.posts == 1
    assert [r.getMessage() for r in caplog.records] == [f"hints do not get through: HTTP {status} as the test wants it"]


def test_every_status_has_a_meaning() -> None:
    meanings = {status: verdict_of(status) for status in range(200, 600)}
    assert meanings[202] is Verdict.ARRIVED and meanings[307] is Verdict.UNWELCOME
    assert {status for status, v in meanings.items() if v is Verdict.LATER} == {408, 429, *range(500, 600)}


def test_a_server_that_is_away_gets_the_hints_when_it_comes(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "upbeat")
    away = [Answer(Verdict.LATER, "ConnectionRefusedError")] * 2
    transport = HeldTransport(away)
    transport.go.set()
    sends = sender(transport)
    sends.put(Advisory("a"))
    assert sends.flush(20) and sends.counters == upbeat.Counters(sent=1) and len(transport.posted) == 3
    assert [r.getMessage() for r in caplog.records] == [
        "hints do not get through: ConnectionRefusedError",
        "hints get through again",
    ]


def test_nobody_listening_is_no_error_and_closing_does_not_wait_for_him() -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        client = AdvisoryClient(f"http://127.0.0.1:{s.getsockname()[1]}")
        client.advise("a")
        assert not client.close(timeout_s=30), "closed as soon as the server is seen to be away"
        assert client.counters.dropped == 1
        client.advise("b")
        assert client.counters.dropped == 2, "closed is closed"
        assert client.close(), "nothing waits any more"


def test_a_kept_connection_that_the_server_closed_is_opened_again() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        closed = threading.Event()

        def serve() -> None:
            for _ in range(2):
                connection, _ = listening.accept()
                with connection:
                    connection.recv(65536)
                    connection.sendall(b"HTTP/1.1 202 Accepted\r\nContent-Length: 2\r\n\r\n{}")
                closed.set()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        transport = HttpTransport(f"http://127.0.0.1:{listening.getsockname()[1]}", None, 5.0)
        assert transport.post("/v1/advisory", {}).verdict is Verdict.ARRIVED
        assert closed.wait(10)
        assert transport.post("/v1/advisory", {}).verdict is Verdict.ARRIVED
        transport.close()
        thread.join(10)


@pytest.mark.parametrize("said", [b"", b"nonsense\r\n\r\n"])
def test_a_server_that_speaks_nonsense_is_one_that_is_away(said: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(said)

        threading.Thread(target=serve, daemon=True).start()
        transport = HttpTransport(f"http://127.0.0.1:{listening.getsockname()[1]}", None, 5.0)
        assert transport.post("/v1/advisory", {}).verdict is Verdict.LATER


def test_the_thread_ends_when_nothing_comes_and_returns_with_the_next_hint() -> None:
    transport = HeldTransport()
    transport.go.set()
    sends = sender(transport, idle_s=0.0)
    for name in ("a", "b"):
        before = set(threading.enumerate())
        sends.put(Advisory(name))
        started = set(threading.enumerate()) - before
        assert sends.flush(10)
        for thread in started:
            thread.join(10)
            assert not thread.is_alive()
    assert sends.counters.sent == 2


def test_a_turn_is_announced_and_withdrawn_only_when_no_request_was_made(server: ScriptedServer) -> None:
    with AdvisoryClient(server.url) as client:
        with pytest.raises(KeyError), client.session("lost", priority=1):
            raise KeyError
        with pytest.raises(KeyError), client.session("asked") as turn:
            raise KeyError(turn.headers(), upbeat.current_session())
        with client.session("fine"):
            pass
        assert client.flush() and upbeat.current_session() is None
    assert [e for e in server.order() if e[0] == "invalidate"] == [("invalidate", "lost")]
    assert ("advise", "asked") in server.order() and ("advise", "fine") in server.order()


def test_a_turn_with_an_id_that_is_none_spoils_no_request(server: ScriptedServer) -> None:
    with AdvisoryClient(server.url) as client, client.session("not legal") as turn:
        assert turn.headers() == {} and upbeat.current_session() is None and client.counters.invalid == 1


async def test_the_asynchronous_client_does_the_same_without_holding_the_loop_up(server: ScriptedServer) -> None:
    async with AsyncAdvisoryClient(server.url) as client:
        client.advise("a")
        with pytest.raises(KeyError):
            async with client.session("lost"):
                raise KeyError
        assert await client.flush()
        assert client.counters.sent >= 2
    assert ("advise", "a") in server.order() and ("invalidate", "lost") in server.order()


def run_script(script: str, url: str) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys, os; sys.path.insert(0, {str(SOURCES)!r}); URL = {url!r}\n{script}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout


def test_hints_leave_when_the_interpreter_ends(server: ScriptedServer) -> None:
    run_script(
        "import upbeat; upbeat.AdvisoryClient(URL).advise('last'); client = upbeat.AdvisoryClient(URL); "
        "client.advise('words')",
        server.url,
    )
    assert sorted(e.session or "" for e in server.events) == ["last", "words"]


def test_the_end_of_the_interpreter_does_not_wait_for_a_server_that_is_away() -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        script = "import upbeat; c = upbeat.AdvisoryClient(URL, exit_timeout_s=60); c.advise('a'); print('ended')"
        assert run_script(script, f"http://127.0.0.1:{s.getsockname()[1]}") == "ended\n"


def test_a_forked_child_hints_for_itself_and_never_sends_its_parents_hints(server: ScriptedServer) -> None:
    script = """
import upbeat
client = upbeat.AdvisoryClient(URL)
client.advise("parent")
assert client.flush()
child = os.fork()
if not child:
    client.advise("child")
    os._exit(0 if client.flush() and client.counters.sent == 1 else 1)
assert os.waitpid(child, 0)[1] == 0
client.advise("parent-again")
assert client.flush()
assert client.counters.sent == 2
"""
    run_script(script, server.url)
    assert server.order() == [("advise", "parent"), ("advise", "child"), ("advise", "parent-again")]


def test_a_fork_while_a_hook_is_at_work_leaves_the_child_free() -> None:
    script = """
import upbeat
team = upbeat.Workflow(upbeat.AdvisoryClient(URL), "team")
with team.lock, team.client._sender._changed:
    child = os.fork()
    if not child:
        team.asks(team.hop("a", "r"), ["b"])
        os._exit(0 if team.client.counters.waiting else 1)
assert os.waitpid(child, 0)[1] == 0
"""
    run_script(script, "http://127.0.0.1:9")


def test_a_signal_that_hints_may_interrupt_a_hint(server: ScriptedServer) -> None:
    script = """
import signal, upbeat
client = upbeat.AdvisoryClient(URL)
signal.signal(signal.SIGALRM, lambda *_: client.advise("from-the-signal"))
with client._sender._changed:  # as inside `advise`
    signal.raise_signal(signal.SIGALRM)
assert client.flush()
"""
    run_script(script, server.url)
    assert server.order() == [("advise", "from-the-signal")]


def test_the_package_needs_nothing_but_python() -> None:
    script = "import upbeat; print({m.partition('.')[0] for m in sys.modules} - set(sys.stdlib_module_names))"
    others = {
        "httpx",
        "httpx2",
        "pydantic",
        "requests",
        "agents",
        "langchain_core",
        "langgraph",
        "crewai",
        "agent_framework",
        "openai",
    }
    assert not others & set(re.findall(r"\w+", run_script(script, "")))
