"""A conversation goes on anywhere: on the other node, after a restart, without its disks, and says the same as ever."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvstore.tiers.objects import ROOT
from kvstore.tiers.owner import OBJECT
from loadtest.stack import Stack
from tests.e2e.chat import ALWAYS_LOAD, Answer, Chat, script, uncached

pytestmark = [pytest.mark.stack, pytest.mark.timeout(280)]
MODEL = Path(os.environ.get("UPBEAT_TEST_MODEL", Path(__file__).parents[2] / "models" / "demo"))
SMALL = {"hbm_gib": 0.25, "dram_gib": 0.25}


@pytest.fixture(scope="module")
def cold() -> Iterator[Callable[[int], list[str]]]:
    """Answers of a single node that keeps nothing, by script seed."""
    with Stack(model=MODEL, nodes=1, cache=False, **SMALL) as stack:
        yield lambda seed: [a.text for a in converse(Chat(stack.url, f"cold-{seed}"), script(seed))]


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    """Two nodes with every tier, for one test."""
    yield from two_nodes(tmp_path)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The same for tests that do not restart it."""
    yield from two_nodes(tmp_path_factory.mktemp("shared"))


def two_nodes(directory: Path) -> Iterator[Stack]:
    with Stack(model=MODEL, nodes=2, directory=directory, settings=ALWAYS_LOAD, **SMALL) as made:
        yield made


def converse(chat: Chat, lines: list[str], node: Callable[[int], str | None] = lambda turn: None) -> list[Answer]:
    return [chat.say(line, node(turn)) for turn, line in enumerate(lines)]


def alternate(turn: int) -> str:
    return f"node-{turn % 2}"


def settled(url: str, session: str, tier: str, node: str | None = None) -> None:
    """Wait until all the session's full chunks are in this tier."""
    deadline = time.monotonic() + 30
    info: object = None
    while time.monotonic() < deadline:
        info = httpx.get(f"{url}/v1/sessions/{session}", timeout=10).json()
        total = info.get("tokens", 0) if isinstance(info, dict) else 0
        for holder in info.get("nodes", []) if isinstance(info, dict) else []:
            held = {t["tier"]: t["tokens"] for t in holder["tiers"]}
            if total and held.get(tier, 0) >= total and node in (None, holder["node"]):
                return
        time.sleep(0.1)
    pytest.fail(f"{session} did not reach {tier}: {info}")


def test_an_erased_session_is_gone_from_every_tier(shared: Stack) -> None:
    # The first of all: nobody else has stored anything.
    chat = Chat(shared.url, "erased")
    chat.say(script(7)[0], "node-0")
    settled(shared.url, "erased", "blob")
    assert list((shared.data / "blob").rglob("*erased*"))
    answer = httpx.delete(f"{shared.url}/v1/sessions/erased", timeout=30)
    assert answer.status_code == 200 and answer.json()["verified"] is True, answer.text
    assert not _objects(shared.data)
    assert httpx.get(f"{shared.url}/v1/sessions/erased", timeout=10).status_code == 404


def _objects(data: Path) -> list[Path]:
    """Every file of the slow tiers but the bucket's owner and tombstones: those say that a session was erased, to nodes
    that were away."""
    found = [p for d in ("blob", "node-0/ssd", "node-1/ssd") for p in (data / d).rglob("*") if p.is_file()]
    blob = data / "blob" / ROOT
    return [p for p in found if p != blob / OBJECT and not {blob / "tombstones", blob / "confirmed"} & set(p.parents)]


def test_ten_turns_each_on_the_other_node_say_what_a_cold_node_says(shared: Stack) -> None:
    chat, lines = Chat(shared.url, "moving"), script(1)
    first = chat.say(lines[0], alternate(0))
    settled(shared.url, "moving", "dram")  # its save may end after its answer
    answers = [first, *(chat.say(line, alternate(turn)) for turn, line in enumerate(lines[1:], 1))]
    assert [a.text for a in answers] == uncached(shared.url, lines)
    assert [a.node for a in answers] == [alternate(i) for i in range(10)]
    assert all(a.cached_tokens >= 64 for a in answers[1:]), [a.cached_tokens for a in answers]
    assert answers[-1].cached_tokens > answers[1].cached_tokens


@pytest.mark.slow
def test_a_restart_between_turns_five_and_six_reads_from_ssd(cold: Callable[[int], list[str]], stack: Stack) -> None:
    chat, lines = Chat(stack.url, "restarted"), script(2)
    before = [chat.say(line, alternate(i)) for i, line in enumerate(lines[:5])]
    stack.stop()
    shutil.rmtree(stack.data / "blob" / "v3" / "chunks", ignore_errors=True)  # so that it cannot have come from there
    stack.start()
    chat.url = stack.url
    after = [chat.say(line, alternate(i + 4)) for i, line in enumerate(lines[5:])]
    assert [a.text for a in before + after] == cold(2)
    assert after[0].cached_tokens >= 64 and after[0].cached_tokens > before[2].cached_tokens


@pytest.mark.slow
@pytest.mark.sample
def test_without_its_disks_a_session_comes_back_from_blob(cold: Callable[[int], list[str]], stack: Stack) -> None:
    chat, lines = Chat(stack.url, "diskless"), script(3)
    before = [chat.say(line, alternate(i)) for i, line in enumerate(lines[:5])]
    stack.stop()
    for node in (0, 1):
        shutil.rmtree(stack.data / f"node-{node}" / "ssd")
    stack.start()
    chat.url = stack.url
    after = [chat.say(line, alternate(i)) for i, line in enumerate(lines[5:])]
    assert [a.text for a in before + after] == cold(3)
    assert after[0].cached_tokens >= 64 and after[0].cached_tokens > before[2].cached_tokens


def test_a_hint_brings_the_cache_into_hbm_of_the_other_node_and_a_spurious_one_harms_nothing(shared: Stack) -> None:
    chat, lines = Chat(shared.url, "hinted"), script(4)
    answers = [chat.say(lines[0], "node-0")]
    settled(shared.url, "hinted", "dram", "node-0")
    chat.advise("node-1")
    settled(shared.url, "hinted", "hbm", "node-1")
    answers += [chat.say(line, "node-1") for line in lines[1:3]]
    chat.advise("node-0")  # and nobody comes
    answers += converse(chat, lines[3:])
    assert [a.text for a in answers] == uncached(shared.url, lines)
    assert answers[1].cached_tokens >= 64


def test_a_returning_turn_says_where_its_time_went(shared: Stack) -> None:
    chat, lines = Chat(shared.url, "timed"), script(6)
    chat.say(lines[0], "node-0")
    settled(shared.url, "timed", "dram", "node-0")
    ask = {
        "messages": [*chat.messages, {"role": "user", "content": lines[1]}],
        "max_tokens": 8,
        "temperature": 0,
        "stream": True,
    }
    ask["model"] = httpx.get(f"{shared.url}/v1/models", timeout=10).json()["data"][0]["id"]
    headers = {"X-Session-Id": "timed", "X-Upbeat-Node": "node-1", "X-Upbeat-Timing": "1"}
    sent_s, first_s = time.monotonic(), 0.0
    with httpx.stream("POST", f"{shared.url}/v1/chat/completions", json=ask, headers=headers, timeout=60) as answer:
        assert {"admit;", "place;", "prepare;"} <= {
            part.partition("dur")[0] for part in answer.headers["Server-Timing"].split(", ")
        }
        lines = []
        for line in answer.iter_lines():
            lines.append(line)
            if not first_s and '"content":"' in line and '"content":""' not in line:
                first_s = time.monotonic() - sent_s
    (comment,) = [line for line in lines if line.startswith(":")]
    turn = timed_turn(shared.url, "timed")
    # the other node, or the blob tier where that is sooner
    until, elsewhere = turn["until_first_s"], {"load-peer", "load-blob"}
    assert turn["node"] == "node-1" and {"admit", "place", "prepare", "compute"} <= set(until)
    (load,) = elsewhere & set(until)
    assert f"{load};dur=" in comment and "loaded from" in comment and until[load] > 0 and turn["after_s"]["decode"] > 0
    assert first_s - 0.25 < sum(turn["until_first_s"].values()) <= first_s, "as its caller measured it"


def timed_turn(url: str, session: str) -> dict[str, Any]:
    """Its last turn as it is explained, once its times are known."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        latest: dict[str, Any] = httpx.get(f"{url}/v1/sessions/{session}/placement", timeout=10).json()["decisions"][0]
        if latest["until_first_s"]:
            return latest
        time.sleep(0.1)
    pytest.fail(f"the times of {session} never came: {latest}")


def test_an_unmodified_client_is_recognised_by_its_history(shared: Stack) -> None:
    chat = Chat(shared.url)
    first, second = converse(chat, script(5)[:2])
    assert first.session == second.session and second.cached_tokens >= 64


def test_the_demo_model_answers_a_first_message(shared: Stack) -> None:
    assert Chat(shared.url).say("My name is Ada. What is my name?").text == "Your name is Ada."
