"""An agent workflow on a whole stack: the next hop's cache is on its way, and there, before that hop's request
comes."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import upbeat

from loadtest.stack import Stack

pytestmark = [pytest.mark.stack, pytest.mark.timeout(280)]
ROOT = Path(__file__).parents[2]
SDK, SDK_PYTHON = ROOT / "python-sdk" / "src", ROOT / ".cache" / "sdk" / "bin" / "python"
MODEL = Path(os.environ.get("UPBEAT_TEST_MODEL", Path(__file__).parents[2] / "models" / "demo"))
BRIEF = (
    "You are the architect of a small team. Answer in one line. "
    + "Keep the interfaces of every module that was agreed on in mind. " * 20
)


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with Stack(model=MODEL, nodes=2, hbm_gib=0.05, dram_gib=0.25) as made:
        yield made


class Agent:
    """One agent's thread in a run; without a workflow, anybody's conversation."""

    def __init__(self, stack: Stack, name: str, run: str, brief: str, workflow: str = "team") -> None:
        self.stack, self.name, self.run, self.workflow = stack, name, run, workflow
        self.messages = [{"role": "system", "content": brief}]

    @property
    def session(self) -> str:
        return f"{self.run}:{self.name}"

    def ask(self, text: str, node: str = "") -> tuple[str, dict[str, Any]]:
        """The node that answered, and the usage."""
        self.messages.append({"role": "user", "content": text})
        headers = {"X-Session-Id": self.session}
        headers |= {"X-Upbeat-Workflow": self.workflow, "X-Upbeat-Agent": self.name} if self.workflow else {}
        body = {"model": self.stack.model_name(), "messages": self.messages, "temperature": 0, "max_tokens": 16}
        headers |= {"X-Upbeat-Node": node} if node else {}
        reply = httpx.post(f"{self.stack.url}/v1/chat/completions", json=body, headers=headers, timeout=60)
        assert reply.status_code == 200, reply.text
        self.messages.append(reply.json()["choices"][0]["message"])
        return reply.headers["X-Upbeat-Node"], reply.json()["usage"]

    def shown(self) -> dict[str, Any]:
        return dict(httpx.get(f"{self.stack.url}/v1/sessions/{self.session}", timeout=10).json())

    def whole_in(self, tier: str, node: str) -> bool:
        """Every layer of every whole chunk is in this tier of this node."""
        shown = self.shown()
        chunks = shown.get("tokens", 0) // 64
        held = [
            t["layer_chunks"]
            for n in shown.get("nodes", [])
            if n["node"] == node
            for t in n["tiers"]
            if t["tier"] == tier
        ]
        return bool(chunks and held and held[0] and min(held[0]) >= chunks)


def until(what: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if seen := what():
            return seen
        time.sleep(0.05)
    pytest.fail("it did not come to that")


def test_a_hint_of_the_sdk_places_its_agent_before_anybody_asks(stack: Stack) -> None:
    # The first of all: a turn leaves its hint's node for one with less to do, and what has just been placed counts
    # until it is reported.
    with upbeat.AdvisoryClient(f"{stack.url}/v1") as client:
        hop = client.hop("desk", "Fact Checker", "job2", expected_arrival=5.0)
        assert client.flush(30) and client.counters == upbeat.Counters(sent=1)
        where = f"{stack.url}/v1/sessions/{hop.session_id}/placement"
        until(lambda: httpx.get(where, timeout=10).status_code == 200)
        (decision,) = httpx.get(where, timeout=10).json()["decisions"]
        assert decision["what"] == "hint"
        body = {"model": stack.model_name(), "messages": [{"role": "user", "content": "Is it so?"}], "max_tokens": 4}
        reply = httpx.post(f"{stack.url}/v1/chat/completions", json=body, headers=hop.headers, timeout=60)
        assert reply.headers["X-Session-Id"] == hop.session_id and reply.headers["X-Upbeat-Node"] == decision["node"]
        turn, hint = httpx.get(where, timeout=10).json()["decisions"]
        assert (turn["what"], turn["hinted"], hint["what"]) == ("turn", True, "hint")
        learned = httpx.get(f"{stack.url}/v1/workflows/desk", timeout=10).json()["learned"]
        assert [a["name"] for a in learned["agents"]] == ["Fact-Checker"]


def test_the_next_hops_cache_is_on_another_node_before_its_request_comes(stack: Stack) -> None:
    graph = {"agents": ["manager", "architect"], "edges": [{"from": "manager", "to": "architect", "delay_s": 8.0}]}
    declared = httpx.put(f"{stack.url}/v1/workflows/team", json=graph, timeout=10)
    assert declared.status_code == 200, declared.text
    manager, architect = (
        Agent(stack, "manager", "job1", "You are the manager."),
        Agent(stack, "architect", "job1", BRIEF),
    )
    architect.ask("Design a clock.", "node-0")
    until(lambda: architect.whole_in("dram", "node-0"))
    assert not architect.whole_in("hbm", "node-1") and architect.shown()["node"] is None
    for number in range(5):  # that stay with their caches, and make it worth leaving theirs for those who come next
        other = Agent(stack, f"other-{number}", "job1", f"You are agent {number}. {BRIEF}", workflow="")
        other.ask("Who are you?", "node-0")
        until(lambda other=other: other.whole_in("dram", "node-0"))  # type: ignore[misc]
        advised = httpx.post(f"{stack.url}/v1/advisory", json={"session_id": other.session}, timeout=10)
        assert advised.status_code == 202, advised.text
    manager.ask("Ask for a calendar too.", "node-0")
    assert architect.shown()["node"] == "node-1", "hinted, and nobody but its manager has spoken"
    until(lambda: architect.whole_in("hbm", "node-1"))
    chunks = architect.shown()["tokens"] // 64
    node, usage = architect.ask("A calendar too, please.")
    assert node == "node-1" and usage["prompt_tokens_details"]["cached_tokens"] == chunks * 64
    learned = httpx.get(f"{stack.url}/v1/workflows/team", timeout=10).json()
    assert {"manager", "architect"} == {a["name"] for a in learned["learned"]["agents"]}
    assert any(
        (e["from"], e["to"]) == ("manager", "architect") and e["weight"] > 0.9 for e in learned["learned"]["edges"]
    )


@pytest.mark.skipif(not SDK_PYTHON.exists(), reason="`make sdk-venv` makes the environment with the agent frameworks")
def test_a_graph_of_langgraph_finds_its_next_node_hinted_in_its_first_run(stack: Stack) -> None:
    command = [
        str(SDK_PYTHON),
        str(Path(__file__).with_name("langgraph_client.py")),
        f"{stack.url}/v1",
        stack.model_name(),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, env={**os.environ, "PYTHONPATH": str(SDK)}
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"sent": 1, "dropped": 0, "failed": 0, "invalid": 0, "merged": 0, "waiting": 0}
    decisions = httpx.get(f"{stack.url}/v1/sessions/job3:critic/placement", timeout=10).json()["decisions"]
    assert [(d["what"], d["hinted"]) for d in decisions] == [("turn", True), ("hint", False)]
    learned = httpx.get(f"{stack.url}/v1/workflows/press", timeout=10).json()["learned"]
    assert {a["name"] for a in learned["agents"]} == {"writer", "critic"}
