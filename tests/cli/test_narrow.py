"""What commands print in a window of 80 columns, as JSON, and on a terminal; how they end; and completion."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from cli.display import Display
from cli.main import app
from runtime.config_file import load_config

PROGRAM = str(Path(sys.executable).with_name("upbeat"))
GIB = 1 << 30
LONG = "playground-1da5e8e81d90"


def node(number: int) -> dict[str, Any]:
    return {
        "node": f"node-{number}",
        "serving": number < 3,
        "state": "serving" if number < 3 else "draining",
        "models": [
            {"name": "upbeat-demo", "state": "loading", "activation_s": 1.5},
            {"name": "upbeat-demo-the-other", "kv_bytes_used": 93 * GIB // 2, "kv_bytes_cached": 93 * GIB // 2},
        ],
        "memory": [
            {"use": use, "name": "upbeat-demo" if use in ("weights", "kv") else "", "bytes": 31 * GIB}
            for use in ("weights", "kv", "warm", "free")
        ],
        "running": 12,
        "waiting": 345,
        "outstanding_tokens": 123456.0,
        "advised": 1234,
        "hbm_pages_total": 1000,
        "hbm_pages_free": 503,
        "hbm_pages_cached": 501,
        "dram_bytes_total": 64 * GIB,
        "dram_bytes_used": 61 * GIB,
        "ssd_bytes_used": 1234 * GIB,
        "sessions": 54321,
        "metrics": {
            'upbeat_kvstore_hit_bytes_total{tier="dram"}': 4e12,
            'upbeat_kvstore_hint_bytes_total{outcome="used"}': 7e12,
            'upbeat_kvstore_read_bytes_total{source="ssd"}': 1e12,
            'upbeat_kvstore_queued{what="ssd"}': 1234.0,
            'upbeat_kvstore_used_bytes{tier="ssd"}': 1234.0 * GIB,
            'upbeat_kvstore_limit_bytes{tier="ssd"}': 4321.0 * GIB,
            'upbeat_kvstore_disk_free_bytes{tier="ssd"}': 3087.0 * GIB,
        },
    }


FLEET = {
    "expected_nodes": 4,
    "active_requests": 7,
    "missing": ["node-3 does not serve"],
    "nodes": [node(i) for i in range(4)],
}
SESSIONS = [
    {
        "id": name,
        "model": "upbeat-demo",
        "tokens": 123456,
        "last_use_s": time.time(),
        "node": "node-1",
        "held_by": ["node-0", "node-1"],
    }
    for name in ("chat-1", LONG)
]
ON = {
    "state": "active",
    "kv_bytes_used": GIB,
    "kv_bytes_cached": 31 * GIB,
    "kv_bytes_limit": 64 * GIB,
    "layers_lent": 12,
}
MODELS = [
    {
        "id": "upbeat-demo",
        "state": "active",
        "nodes": [{"node": f"node-{i}"} | ON for i in range(4)],
        "weight_bytes": 10 << 20,
        "layers": 24,
    }
]
TIERS = [
    {"tier": t, "tokens": 123456, "layer_chunks": [1929] * 79 + [5], "bytes": 99 * GIB}
    for t in ("hbm", "dram", "ssd", "blob")
]
EDGE = {
    "from": "a-planner-with-a-long-name",
    "to": "a-writer-with-a-long-name",
    "probability": 0.5,
    "calls": 1.5,
    "delay_s": 2.0,
}
WORKFLOW = {
    "id": "research",
    "declared": None,
    "learned": {"agents": [{"name": "a", "requests": 7}], "edges": []},
    "edges": [EDGE],
}
MOVE = {"ago_s": 2.0, "state": "cold", "why": "for_weights", "other": "upbeat-demo-the-other", "seconds": 50.0}
LENDS = {"layers": 24, "layers_lent": 12, "may_lend": {"idle": 12, "computing": 3, "transfer_s": 0.5, "layer_s": 0.25}}
LENDS["may_lend"] |= {"never": None}  # type: ignore[operator]
DECISION = {
    "what": "turn",
    "ago_s": 2.0,
    "node": "node-0",
    "request_id": "r1",
    "hinted": True,
    "prefetched_node": "node-0",
}
DECISION |= {"prefetched_s": 3.5, "moves": 0, "pin_node": None, "avoided_nodes": 0, "source_nodes": [], "worth": None}
DECISION |= {
    "scores": [{"node": f"node-{i}", "sum": 0.5 + i, "terms": {"load_s": 0.5, "work_s": float(i)}} for i in range(4)]
}
ROUTES: dict[str, tuple[int, Any]] = {
    "/ready": (503, {"missing": FLEET["missing"]}),
    "/v1/fleet": (200, FLEET),
    "/v1/models": (200, {"data": MODELS}),
    "/v1/sessions": (200, {"data": SESSIONS}),
    "/v1/sessions/chat-1": (200, SESSIONS[0] | {"nodes": [{"node": f"node-{i}", "tiers": TIERS} for i in range(2)]}),
    "/v1/sessions/chat-1/placement": (200, {"id": "chat-1", "decisions": [DECISION]}),
    "/v1/models/upbeat-demo/placement": (
        200,
        {"id": "upbeat-demo", "nodes": [{"node": "node-0", "state": "cold", "moves": [MOVE]} | LENDS]},
    ),
    "/v1/workflows": (200, {"data": [WORKFLOW]}),
    "/v1/workflows/research": (200, WORKFLOW),
    "/v1/advisory": (202, {"session_id": "chat-1", "status": "accepted"}),
    "/v1/invalidate": (202, {"session_id": "chat-1", "status": "accepted"}),
    "/v1/sessions/busy": (503, {"error": {"message": "the scheduler does not answer"}}),
    "/v1/sessions/page": (404, "<html>not found</html>"),
}


class _Answers(BaseHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass

    def _answer(self) -> None:
        key = self.headers.get("authorization")
        self.rfile.read(int(self.headers.get("content-length") or 0))
        status, body = ROUTES.get(self.path.partition("?")[0], (404, {"error": {"message": "not here"}}))
        if key == "Bearer wrong":
            status, body = 401, {"error": {"message": "incorrect API key provided"}}
        elif key == "Bearer weak":
            status, body = 403, {"error": {"message": "this route needs a server key"}}
        data = (body if isinstance(body, str) else json.dumps(body)).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = do_DELETE = do_PUT = _answer


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Answers)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def upbeat(url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """The program in this process: exit status, stdout, stderr. In a window of 80 columns, of the stand-in's
    gateway."""

    def run(*words: str, **environment: str) -> tuple[int, str, str]:
        for name, value in ({"UPBEAT_URL": url, "COLUMNS": "80"} | environment).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "argv", ["upbeat", *words])
        with pytest.raises(SystemExit) as ended:
            app()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return run


PRINTING = [
    ["status"],
    ["models"],
    ["top", "--rounds", "1"],
    ["sessions"],
    ["sessions", "chat-1"],
    ["explain", "chat-1"],
    ["explain", "--model", "upbeat-demo"],
    ["advise", "chat-1"],
    ["invalidate", "chat-1"],
    ["workflows", "list"],
    ["workflows", "show", "research"],
    ["workflows", "delete", "research"],
    ["keys", "new"],
    ["doctor"],
]


@pytest.mark.parametrize("words", PRINTING, ids=" ".join)
def test_80_columns_are_enough_and_nothing_is_cut(upbeat: Run, words: list[str], tmp_path: Path) -> None:
    status, out, err = upbeat(*words, *(["--data", str(tmp_path)] if words == ["doctor"] else []))
    assert status in (0, 1) and not err and out.strip()
    # A key, its line of configuration, and a path stay in one piece.
    long = [line for line in out.splitlines() if len(line) > 80 and not re.search(r"\S{50}", line)]
    assert not long and "…" not in out, out


@pytest.mark.parametrize("words", PRINTING, ids=" ".join)
def test_whatever_prints_prints_json(upbeat: Run, words: list[str], tmp_path: Path) -> None:
    more = ["--data", str(tmp_path)] if words == ["doctor"] else []
    _, out, _ = upbeat(*words, "--json", *more, UPBEAT__WORKER__KERNELS="torch")  # no kernels to measure
    assert isinstance(json.loads(out), dict)


def test_rows_of_the_fleet_stay_in_one_line_each(upbeat: Run) -> None:
    _, out, _ = upbeat("status")
    row = next(line for line in out.splitlines() if line.startswith("node-3"))
    assert row.split() == [
        "node-3",
        "draining",
        "12",
        "345",
        "123456",
        "1234",
        "50+50%",
        "61.00/64.00",
        "1234.00",
        "54321",
    ]
    assert "models: upbeat-demo" in out
    _, out, _ = upbeat("sessions")
    assert any(line.startswith(f"{LONG} ") and "node-0, node-1" in line for line in out.splitlines())


def test_top_puts_below_what_does_not_fit_beside(upbeat: Run) -> None:
    _, out, _ = upbeat("top", "--rounds", "1")
    heads = [
        line.split()
        for line in out.splitlines()
        if line.split() and set(line.split()) <= {f"node-{i}" for i in range(4)}
    ]
    assert heads == [["node-0", "node-1"], ["node-2", "node-3"]]
    wide = upbeat("top", "--rounds", "1", COLUMNS="200")[1]
    assert any(line.split() == [f"node-{i}" for i in range(4)] for line in wide.splitlines())


def test_top_as_json_is_an_object_a_line(upbeat: Run) -> None:
    _, out, _ = upbeat("top", "--rounds", "2", "--every", "0.01", "--json")
    looks = [json.loads(line) for line in out.splitlines()]
    assert len(looks) == 2 and looks[0]["at_s"] <= looks[1]["at_s"]
    assert looks[0]["fleet"]["nodes"][0]["metrics"] and looks[0]["sessions"][1]["id"] == LONG


def test_the_launcher_says_what_happens_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    display = Display(as_json=True)
    display.wait("waiting for the stack to serve")
    display.wait("")
    display.serving(load_config(None, {"gateway": {"port": 9000}, "nodes": {"count": 3}}), 4.5)
    display.line("stopping", "green")
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [e["event"] for e in events] == ["waiting", "serving", "message"]
    assert (events[1]["url"], events[1]["nodes"], events[1]["took_s"]) == ("http://127.0.0.1:9000", 3, 4.5)


@pytest.mark.parametrize(
    ("words", "environment", "status", "told"),
    [
        (["sessions", "nobody"], {}, 5, "`upbeat sessions` lists those that are known"),
        (["explain"], {}, 2, "`upbeat explain --model NAME`"),
        (["explain", "chat-1", "--model", "m"], {}, 2, "name one thing to explain"),
        (["explain", "nobody"], {}, 5, "`upbeat sessions` lists"),
        (["workflows", "show", "nothing"], {}, 5, "`upbeat workflows list` lists"),
        (["sessions"], {"UPBEAT_API_KEY": "wrong"}, 4, "not known there; give another with --key"),
        (["sessions"], {"UPBEAT_API_KEY": "weak"}, 4, "no right to this; give a server key"),
        (
            ["sessions"],
            {"UPBEAT_URL": "http://127.0.0.1:9"},
            3,
            "start a stack with `upbeat up`, or say where one runs",
        ),
        (["top"], {"UPBEAT_URL": "http://127.0.0.1:9"}, 3, "nothing answers"),
        (["sessions", "page"], {}, 3, "is no Upbeat gateway (status 404, no JSON); give its address with --url"),
        (
            ["sessions"],
            {"UPBEAT_URL": "localhost:8080"},
            2,
            "no address of a gateway; give one such as http://127.0.0.1:8080",
        ),
        (["sessions", "busy"], {}, 1, "503: the scheduler does not answer; try again in a moment"),
        (["sessions", "--verbose"], {}, 2, "--verbose"),
        (["top", "--every", "soon"], {}, 2, "'soon' is not a number; give one such as"),
        (["completion", "tcsh"], {}, 2, "give one of bash, zsh, fish"),
    ],
)
def test_what_goes_wrong_is_one_line_that_says_what_to_do(
    upbeat: Run, words: list[str], environment: dict[str, str], status: int, told: str
) -> None:
    ended, out, err = upbeat(*words, **environment)
    assert (ended, out) == (status, "")
    assert len(err.splitlines()) == 1 and err.startswith("upbeat: ") and told in err, err


def test_every_exit_status_is_documented(upbeat: Run) -> None:
    document = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
    for status in ("0", "1", "2", "3", "4", "5", "130"):
        assert f"| {status} |" in document
    assert "3 no gateway answers" in " ".join(upbeat("--help")[1].split())


def test_top_is_live_on_a_terminal_until_it_is_interrupted(url: str) -> None:
    parent, child = pty.openpty()
    program = subprocess.Popen(
        [PROGRAM, "top", "--every", "0.05", "--url", url],
        stdin=child, stdout=child, stderr=child, env=os.environ | {"COLUMNS": "80", "LINES": "60", "TERM": "xterm"},
        start_new_session=True,
    )  # fmt: skip
    os.close(child)
    seen = b""
    deadline = time.monotonic() + 60
    try:
        while seen.count(b"since the last look") < 3 and time.monotonic() < deadline:
            if select.select([parent], [], [], 1.0)[0]:
                seen += os.read(parent, 1 << 16)
        program.send_signal(signal.SIGINT)
        with contextlib.suppress(OSError):  # the terminal has no other end any more
            while select.select([parent], [], [], 10.0)[0] and (more := os.read(parent, 1 << 16)):
                seen += more
        assert program.wait(30) == 130
    finally:
        program.kill()
        program.wait()
        os.close(parent)
    assert b"\x1b[?1049h" in seen and b"\x1b[?1049l" in seen, "a screen of its own, and the old one back"
    assert b"Traceback" not in seen


def test_bash_completes_commands_flags_and_sessions(url: str) -> None:
    asked = """
    source <(upbeat completion bash)
    ask() {
        COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=(); _upbeat_completion upbeat; echo "${COMPREPLY[@]}"
    }
    ask upbeat se
    ask upbeat sessions play
    """
    path = f"{Path(PROGRAM).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", asked],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env=os.environ | {"PATH": path, "UPBEAT_URL": url},
    )
    assert done.stdout.splitlines() == ["sessions", LONG], done.stdout + done.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script(upbeat: Run, shell: str) -> None:
    status, out, _ = upbeat("completion", shell)
    assert status == 0 and "_UPBEAT_COMPLETE" in out
