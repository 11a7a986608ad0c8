"""The playground in a real Chromium: playground.mjs has the scenarios. Before a toy fleet with keys."""

from __future__ import annotations

import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from browser_needs import ROOT
from playground_runs import named, run

sys.path.insert(0, str(Path(__file__).parents[1] / "gateway"))

from gateway_fakes import MODEL, Stack, stack

from contracts.v1 import scheduler_pb2 as pb

KEY = "key-of-the-operator"
#: Of node-0: a model that is here and lends layers, and one that wakes.
MEMORY = [
    pb.MemoryShare(use=use, name=name, bytes=mib << 20)
    for use, name, mib in (
        ("free", "", 9), ("warm", "", 1), ("weights", MODEL, 5), ("weights", "asleep", 3), ("kv", MODEL, 2),
    )
]  # fmt: skip
LOADS = [
    pb.ModelLoad(model=MODEL, state=pb.MODEL_STATE_ACTIVE, running=2, layers_lent=3),
    pb.ModelLoad(model="asleep", state=pb.MODEL_STATE_LOADING, waiting=1, activation_s=0.5),
]


class Brought(dict[str, pb.SessionInfo]):
    """Sessions of a toy scheduler: a hint brings a layer into HBM with each look; it stands until it is withdrawn."""

    def __init__(self, s: Stack) -> None:
        super().__init__()
        self._scheduler = s.scheduler
        self._looks: dict[str, int] = {}

    def get(self, session_id: str, default: Any = None) -> Any:
        hinted = any(a.session.session_id == session_id for a in self._scheduler.advised)
        if not hinted:
            return default
        withdrawn = any(i.session.session_id == session_id for i in self._scheduler.invalidated)
        layers = self._looks[session_id] = min(4, self._looks.get(session_id, 0) + 1)
        tiers = {"hbm": [2] * layers + [0] * (4 - layers), "dram": [2] * 4, "blob": [2] * 4}
        nodes = [
            pb.NodeResidency(
                node="node-0",
                tiers=[{"tier": t, "layer_chunks": c, "tokens": 0, "bytes": sum(c)} for t, c in tiers.items()],
            ),
            pb.NodeResidency(node="node-1", tiers=[{"tier": "ssd", "layer_chunks": [1] * 4, "tokens": 64, "bytes": 4}]),
        ]
        summary = pb.SessionSummary(
            session={"session_id": session_id}, model=MODEL, tokens=128, node="" if withdrawn else "node-0"
        )
        return pb.SessionInfo(summary=summary, known=True, nodes=nodes)


@pytest.fixture(scope="module")
async def keyed() -> AsyncIterator[dict[str, Any]]:
    async with stack(api_keys=[{"key": KEY}], asleep={"node-0": ["asleep"]}) as s:
        s.scheduler.residencies = Brought(s)
        s.scheduler.model.shape.layers = 4
        s.scheduler.set_memory("node-0", MEMORY, LOADS)
        for worker in s.workers:
            worker.tokens_at_most = 5
            worker.times, worker.token_s = ({"queue": 0.001, "load-ssd": 0.002}, {}), 0.005
        yield await run("keyed", s.url, KEY)


@pytest.mark.parametrize("name", named("keyed"))
async def test_the_page_with_a_toy_fleet(keyed: dict[str, Any], name: str) -> None:
    assert keyed[name] is None, keyed[name]


@pytest.fixture(scope="module")
async def thoughtful() -> AsyncIterator[dict[str, Any]]:
    async with stack(1, api_keys=[{"key": KEY}]) as s:
        s.workers[0].says = ["<think>", "\n", "A ", "cat", ".", "\n", "</think>", "\n\n", "Hel", "lo."]
        yield await run("thinking", s.url, KEY)


@pytest.mark.parametrize("name", named("thinking"))
async def test_the_page_with_a_model_that_thinks(thoughtful: dict[str, Any], name: str) -> None:
    assert thoughtful[name] is None, thoughtful[name]


@pytest.mark.parametrize(
    "path", ["/", "/playground/playground.js", "/playground/playground.css", "/playground/icon.svg"]
)
async def test_files_are_served_with_a_policy_that_allows_nothing_foreign(path: str) -> None:
    async with stack(nodes=1, api_keys=[{"key": KEY}]) as s, s.http.get(s.url + path) as answer:
        assert answer.status == 200
        policy = answer.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
        async with s.http.get(s.url + path, headers={"If-None-Match": answer.headers["ETag"]}) as again:
            assert (again.status, await again.read()) == (304, b"")


async def test_no_other_file_is_served() -> None:
    async with stack(nodes=1) as s:
        for name in ("nothing.js", "..%2fapp.py", "%2e%2e%2fapp.py", "../app.py", "playground.js%00", ""):
            async with s.http.get(f"{s.url}/playground/{name}") as answer:
                assert answer.status == 404, name


def test_the_page_has_no_script_or_style_inside_and_names_no_other_host() -> None:
    folder = ROOT / "gateway" / "playground"
    page = (folder / "index.html").read_text()
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\son\w+=|\sstyle=", page)
    for file in folder.iterdir():
        assert not [u for u in re.findall(r"https?://[^\s\"')]+", file.read_text()) if "w3.org" not in u], file.name
