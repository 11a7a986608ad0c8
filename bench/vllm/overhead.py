"""What gateway and sidecar add to a vLLM server's answers: the same requests to a bare server, to the server behind the
sidecar directly (its Unix socket), and through the gateway."""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import servers
from rich.console import Console

sys.path.append(str(servers.HERE.parent / "gateway"))

from client import Answer, Connection, checked, post

from loadtest.compare.targets import Programs
from loadtest.figures import spread
from loadtest.policies import fixed_answers
from loadtest.prompts import block_words
from loadtest.stack import Stack
from runtime.config_file import load_config
from runtime.vllm_places import vllm_places

BARE, SERVER, GATEWAY = "bare server", "server behind the sidecar", "gateway"
AT_ONCE = 16
_CHAT = "/v1/chat/completions"
#: Requests of a block, and those before it.
_BLOCK, _UNCOUNTED = 25, 2
_SHORT = {"words": 12, "tokens": 4}
_STREAMED = {"words": 96, "tokens": 64}
_WHOLE = f'"completion_tokens":{_STREAMED["tokens"]}'.encode()


@dataclass
class Subject:
    """A way to a server. named: requests name their sessions, as clients of ours may."""

    name: str
    connect: Callable[[], Any]
    headers: dict[str, str] = field(default_factory=dict)
    named: bool = False

    def request(self, number: int, body: dict[str, Any]) -> bytes:
        """A chat request as bytes."""
        session = {"X_Session_Id": f"{self.name.replace(' ', '-')}-{number}"} if self.named else {}
        return post(_CHAT, body, **self.headers, **session)


def measure(
    setting: servers.Setting, scratch: Path, pairs: int, rounds: int, each: int, names: list[str], console: Console
) -> dict[str, Any]:
    """Latency and throughput of each subject in `names`. each: requests of a connection in a round."""
    with ExitStack() as running:
        subjects = []
        if BARE in names:
            console.print("a bare vLLM server starts")
            programs = running.enter_context(Programs(servers.target_file("bare", servers.bare(setting)), scratch))
            port = int(programs.addresses[0].rpartition(":")[2])
            subjects.append(Subject(BARE, lambda: _tcp(port)))
        if {SERVER, GATEWAY} & set(names):
            console.print("a node of Upbeat over vLLM starts")
            stack = running.enter_context(
                Stack(
                    nodes=1,
                    hbm_gib=servers.hbm_gib(setting),
                    dram_gib=setting.dram_gib,
                    directory=scratch / "stack",
                    settings=servers.upbeat_settings(setting, servers.wrapper(setting)),
                    ready_s=900.0,
                )
            )
            subjects += [_behind_sidecar(stack), Subject(GATEWAY, lambda: _tcp(stack.port), named=True)]
        body = fixed_answers(setting.model) | {"model": servers.MODEL, "temperature": 0}
        subjects = [subject for subject in subjects if subject.name in names]
        return asyncio.run(_measured(subjects, body, pairs, rounds, each, console))


def _behind_sidecar(stack: Stack) -> Subject:
    """The stack's own vLLM server, whose socket only this user may open."""
    config = load_config(stack.config_file, {"data": str(stack.data), "run_dir": str(stack.run_dir)})
    places = vllm_places(config, 0)
    key = places.key.read_text().strip()
    return Subject(SERVER, lambda: _unix(places.socket), {"Authorization": f"Bearer {key}"})


class Streamed(Connection):
    """whole: the last answer's usage counts as many tokens as planned."""

    def send(self, request: bytes) -> asyncio.Future[Answer]:
        self.whole, self._before = False, b""
        return super().send(request)

    def data_received(self, data: bytes) -> None:
        joined = self._before + data
        self.whole = self.whole or _WHOLE in joined.replace(b" ", b"")
        self._before = joined[-2 * len(_WHOLE) :]
        super().data_received(data)


async def _tcp(port: int) -> Streamed:
    return (await asyncio.get_running_loop().create_connection(Streamed, "127.0.0.1", port))[1]


async def _unix(path: Path) -> Streamed:
    return (await asyncio.get_running_loop().create_unix_connection(Streamed, str(path)))[1]


def _body(common: dict[str, Any], number: int, words: int, tokens: int) -> dict[str, Any]:
    said = " ".join(block_words(number, words))
    return common | {"messages": [{"role": "user", "content": said}], "max_tokens": tokens}


async def _measured(
    subjects: list[Subject], body: dict[str, Any], pairs: int, rounds: int, each: int, console: Console
) -> dict[str, Any]:
    seconds = await _latencies(subjects, body, pairs)
    console.print(f"{pairs} short requests to each were answered")
    rates = await _rates(subjects, body, rounds, each, console)
    found: dict[str, Any] = {
        "latency": {
            name: {"ms": {key: round(1000 * of[key], 3) for key in ("p50", "p99")} | {"count": of["count"]}}
            for name, taken in seconds.items()
            if (of := spread(taken))
        },
        "tokens_per_s": {name: [round(rate, 2) for rate in of] for name, of in rates.items()},
        "added": {},
    }
    for name in (BARE, SERVER):
        if GATEWAY not in seconds or name not in seconds:
            continue
        differences = [ours - theirs for ours, theirs in zip(seconds[GATEWAY], seconds[name], strict=True)]
        p99 = found["latency"][GATEWAY]["ms"]["p99"] - found["latency"][name]["ms"]["p99"]
        kept = [ours / theirs for ours, theirs in zip(rates[GATEWAY], rates[name], strict=True)]
        found["added"][f"to the {name}"] = {
            "p50_ms": round(1000 * statistics.median(differences), 3),
            "p99_ms": round(p99, 3),
            "throughput_kept": round(statistics.median(kept), 4),
            "throughput_kept_range": [round(min(kept), 4), round(max(kept), 4)],
        }
    return found


async def _latencies(subjects: list[Subject], body: dict[str, Any], pairs: int) -> dict[str, list[float]]:
    """Seconds of whole answers: a block of requests to each subject in turn, in changing order, and the same ones.

    A vLLM server that was idle answers up to a second late here, so the first ones of a block are not counted."""
    connections = {subject.name: await subject.connect() for subject in subjects}
    taken: dict[str, list[float]] = {subject.name: [] for subject in subjects}
    order = random.Random(3)
    for first in range(0, pairs, _BLOCK):
        turn = list(subjects)
        order.shuffle(turn)
        for subject in turn:
            for number in range(first - _UNCOUNTED, min(first + _BLOCK, pairs)):
                request = subject.request(number, _body(body, number, **_SHORT))
                answer: Answer = checked(await connections[subject.name].send(request))
                if number >= first:
                    taken[subject.name].append(answer.total_s)
    for connection in connections.values():
        connection.transport.close()
    return taken


async def _rates(
    subjects: list[Subject], body: dict[str, Any], rounds: int, each: int, console: Console
) -> dict[str, list[float]]:
    """Output tokens a second of AT_ONCE connections that each stream `each` answers, one after the other."""
    rates: dict[str, list[float]] = {subject.name: [] for subject in subjects}
    streamed = body | {"stream": True, "stream_options": {"include_usage": True}}
    order = random.Random(4)
    for number in range(-1, rounds):  # the first is not counted
        turn = list(subjects)
        order.shuffle(turn)
        for subject in turn:
            rate = await _rate(subject, streamed, 1_000_000 * (number + 2), each if number >= 0 else 1)
            if number >= 0:
                rates[subject.name].append(rate)
        console.print(f"round {number + 1} of {rounds} of streams")
    return rates


async def _rate(subject: Subject, body: dict[str, Any], first: int, each: int) -> float:
    connections = [await subject.connect() for _ in range(AT_ONCE)]

    async def caller(place: int, connection: Streamed) -> None:
        for number in range(each):
            name = first + place * each + number
            answer = checked(await connection.send(subject.request(name, _body(body, name, **_STREAMED))))
            if not connection.whole:
                raise RuntimeError(f"{subject.name} did not stream {_STREAMED['tokens']} tokens: {answer.begins!r}")

    began_s = time.perf_counter()
    await asyncio.gather(*(caller(place, connection) for place, connection in enumerate(connections)))
    took_s = time.perf_counter() - began_s
    for connection in connections:
        connection.transport.close()
    return AT_ONCE * each * _STREAMED["tokens"] / took_s
