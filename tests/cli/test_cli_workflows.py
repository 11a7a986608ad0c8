"""`upbeat workflows`: against a small real HTTP server, and from recordings."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from upbeat_here import upbeat

from contracts.workflow import parse_graph
from loadtest.recorded_runs import Recorded, as_declared, learn

GRAPH: dict[str, Any] = {
    "agents": ["manager", "qa"],
    "edges": [{"from": "manager", "to": "qa", "probability": 0.25, "calls": 3.0, "delay_s": 1.5}],
    "learn": True,
}
TEAM = {
    "id": "team",
    "object": "workflow",
    "declared": GRAPH,
    "learned": {"agents": [{"name": "qa", "requests": 17}], "edges": []},
    "edges": GRAPH["edges"],
}


class Workflows(ThreadingHTTPServer):
    """Knows the workflow "team", and remembers what it was asked."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.asked: list[tuple[str, str, Any]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Answers(BaseHTTPRequestHandler):
    server: Workflows

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _answer(self) -> None:
        length = int(self.headers.get("content-length") or 0)
        self.server.asked.append((self.command, self.path, json.loads(self.rfile.read(length)) if length else None))
        known: dict[str, Any] = {"GET": TEAM, "PUT": TEAM, "DELETE": {"id": "team", "deleted": True}}
        status, answer = 200, known[self.command]
        if self.path == "/v1/workflows":
            answer = {"object": "list", "data": [TEAM, TEAM | {"id": "other", "declared": None}]}
        elif self.path != "/v1/workflows/team":
            status, answer = 404, {"error": {"message": "there is no such workflow"}}
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_PUT = do_DELETE = _answer


@pytest.fixture
def gateway() -> Iterator[Workflows]:
    server = Workflows()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def workflows(*words: object, url: str = "http://127.0.0.1:9") -> subprocess.CompletedProcess[str]:
    return upbeat("workflows", *map(str, words), UPBEAT_URL=url)


def rows(done: subprocess.CompletedProcess[str]) -> list[list[str]]:
    assert done.returncode == 0, done.stderr
    return [line.split() for line in done.stdout.splitlines()]


def test_workflows_are_listed_and_one_is_shown_with_its_edges(gateway: Workflows) -> None:
    listed = rows(workflows("list", url=gateway.url))
    assert ["team", "yes", "2", "1", "17"] in listed and ["other", "no", "1", "1", "17"] in listed
    shown = workflows("show", "team", url=gateway.url)
    assert ["manager", "qa", "25%", "3.0", "1.50", "s"] in rows(shown) and "qa 17" in shown.stdout
    assert json.loads(workflows("show", "team", "--json", url=gateway.url).stdout) == TEAM
    assert len(json.loads(workflows("list", "--json", url=gateway.url).stdout)["data"]) == 2


def test_a_graph_is_put_from_a_file_and_deleted(gateway: Workflows, tmp_path: Path) -> None:
    file = tmp_path / "graph.json"
    file.write_text(json.dumps(GRAPH))
    done = workflows("put", "team", file, url=gateway.url)
    assert done.returncode == 0 and "2 agents and 1 edges" in done.stdout
    assert workflows("delete", "team", url=gateway.url).returncode == 0
    assert gateway.asked == [("PUT", "/v1/workflows/team", GRAPH), ("DELETE", "/v1/workflows/team", None)]
    done = workflows("delete", "nobody", url=gateway.url)
    assert done.returncode == 5 and "404: there is no such workflow" in done.stderr


def test_what_is_wrong_is_said_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / "graph.json"
    file.write_text(json.dumps(GRAPH | {"edges": [{"from": "manager", "to": "ceo"}]}))
    for words, said in (
        (("put", "team", file), "edges[0].to"),
        (("show", "a/b"), "NAME must match"),
        (("put", "team", tmp_path / "none"), "cannot be read"),
        (("profile", tmp_path / "none"), "cannot be read"),
        (("profile", "/dev/null"), "no request is recorded"),
    ):
        done = workflows(*words)
        assert done.returncode == 2 and said in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr


# ---- profile --------------------------------------------------------------------------------------------------
def recording(path: Path, *requests: dict[str, Any]) -> Path:
    path.write_text("\n".join(json.dumps(r) for r in requests) + "\n\n")
    return path


def request(run: str, agent: str, start_s: float, end_s: float, session: str = "") -> dict[str, Any]:
    return {"run": run, "agent": agent, "session_id": f"{run}:{session or agent}", "start_s": start_s, "end_s": end_s}


def test_a_profile_of_recorded_runs_is_shown_printed_as_a_graph_and_put(gateway: Workflows, tmp_path: Path) -> None:
    lines = [
        [request(run, "manager", 0, 2), *(request(run, "qa", 3, 9, f"qa{i}") for i in range(3))] for run in ("r1", "r2")
    ]
    files = [recording(tmp_path / f"{i}.jsonl", *reversed(each)) for i, each in enumerate(lines)]
    done = workflows("profile", *files)
    assert "8 requests in 2 runs of 2 agents" in done.stdout and ["manager", "qa", "100%", "3.0", "3.00", "s"] in rows(
        done
    )
    printed = json.loads(workflows("profile", *files, "--json").stdout)
    graph = parse_graph(printed)
    assert [(e.source, e.target, e.calls) for e in graph.edges] == [("manager", "qa", pytest.approx(3.0))]
    assert "declared: team" in workflows("profile", *files, "--put", "team", url=gateway.url).stdout
    assert gateway.asked == [("PUT", "/v1/workflows/team", printed)]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("nonsense", "not JSON"),
        ("[]", "not an object"),
        (json.dumps(request("r", "a", 0, 1) | {"agent": "a b"}), "agent must match"),
        (json.dumps(request("r", "a", 2, 1)), "end_s 1 is before start_s 2"),
        (json.dumps(request("r", "a", 0, 1) | {"end_s": "x"}), "end_s is no number"),
        ('{"run": "r", "agent": "a"}', "session_id is missing"),
    ],
)
def test_a_recording_that_is_wrong_is_named_with_its_line(tmp_path: Path, line: str, said: str) -> None:
    file = recording(tmp_path / "r.jsonl", request("r", "a", 0, 1))
    file.write_text(file.read_text() + line)
    done = workflows("profile", file)
    assert done.returncode == 2 and f"{file}:3: " in done.stderr and said in done.stderr


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["r", "s"]), st.sampled_from("ab"), st.sampled_from("xy"), st.floats(0, 50), st.floats(0, 9)
        ),
        max_size=50,
    )
)
@settings(max_examples=50, deadline=None)
def test_any_recording_gives_a_graph_that_can_be_declared(requests: list[tuple[str, str, str, float, float]]) -> None:
    graph, _ = learn(
        Recorded(run, agent, session, start, start + took) for run, agent, session, start, took in requests
    )
    graph.validate()
    if graph.agents:
        declared = as_declared(graph)
        assert all(0 <= e.probability <= 1 and e.calls >= 1 and e.delay_s >= 0 for e in declared.edges)
