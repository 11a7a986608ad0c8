"""The measurements: latency and rate of each subject; streams, memory and hints of the gateway alone."""

from __future__ import annotations

import asyncio
import statistics
from dataclasses import dataclass, field
from typing import Any

from backend import HELD, MODEL, STREAMED, TOGETHER, WHOLE
from client import Connection, as_fast_as_answered, checked, connect, in_turn, post
from processes import Processes, measured

CHAT, ADVISE = "/v1/chat/completions", "/v1/advisory"
#: Prompt sizes in characters.
SIZES = {"small": 60, "100 KB": 100_000}
#: Sessions per round; each is hinted once and asks once.
ROUND = 20
#: Seconds until a hint has reached the scheduler and its answer the gateway.
_TOLD_S = 0.05


@dataclass(frozen=True)
class Case:
    """A prompt size, streamed or not."""

    size: str
    stream: bool

    def __str__(self) -> str:
        return f"{self.size}, {'streamed' if self.stream else 'whole'}"

    def body(self, **more: Any) -> dict[str, Any]:
        """A chat request's body."""
        text = ("The quick brown fox jumps over the lazy dog. " * (SIZES[self.size] // 45 + 1))[: SIZES[self.size]]
        given = {
            "model": MODEL,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": STREAMED if self.stream else WHOLE,
            **more,
        }
        return given | ({"stream": True} if self.stream else {})


CASES = [Case(size, stream) for size in SIZES for stream in (False, True)]


@dataclass
class Subject:
    """A server to measure.

    process: the process whose core is measured. named: requests name their sessions. advised: each turn is hinted.
    """

    name: str
    port: int
    process: str
    advised: bool = False
    named: bool = False
    connection: Connection | None = None
    turns: int = 0
    took_ms: dict[str, list[list[float]]] = field(default_factory=dict)

    def request(self, case: Case, number: int) -> bytes:
        """Request `number` as bytes."""
        headers = {"X_Session_Id": self.session(number)} if self.named else {}
        return post(CHAT, case.body(), **headers)

    def session(self, number: int) -> str:
        """The id of session `number`."""
        return f"{self.name.replace(', ', '-')}-{number}"

    async def round(self, case: Case, keep: bool) -> None:
        """One turn of each of `ROUND` sessions: milliseconds to the end of the answer, or to a stream's first token."""
        if self.connection is None:
            self.connection = await connect(self.port)
        numbers = range(self.turns, self.turns + ROUND)
        self.turns += ROUND
        if self.advised:  # a route hint is valid for five seconds
            checked(
                await self.connection.send(
                    post(ADVISE, {"advisories": [{"session_id": self.session(n)} for n in numbers]})
                )
            )
            await asyncio.sleep(_TOLD_S)
        answers = await in_turn(self.connection, [self.request(case, n) for n in numbers])
        if keep:
            self.took_ms.setdefault(str(case), []).append(
                [1e3 * (a.first_s if case.stream else a.total_s) for a in answers]
            )


async def latencies(subjects: list[Subject], rounds: int) -> list[dict[str, Any]]:
    """Per case and subject: p50, p95, p99 in ms, and the latency added to the backend's (median over rounds).

    The first subject is the backend. All subjects take turns within a round.
    """
    found = []
    for case in CASES:
        for i in range(-1, rounds):
            for subject in subjects:
                await subject.round(case, keep=i >= 0)
        direct = [statistics.median(r) for r in subjects[0].took_ms[str(case)]]
        row: dict[str, Any] = {"case": str(case)}
        for subject in subjects:
            of_rounds = subject.took_ms[str(case)]
            quantiles = statistics.quantiles([ms for r in of_rounds for ms in r], n=100)
            added = statistics.median(statistics.median(r) - d for r, d in zip(of_rounds, direct, strict=True))
            row[subject.name] = {
                "added_ms": [round(statistics.median(r) - d, 4) for r, d in zip(of_rounds, direct, strict=True)],
                "p50_ms": round(quantiles[49], 3), "p95_ms": round(quantiles[94], 3), "p99_ms": round(quantiles[98], 3),
                "added_p50_ms": round(added, 3),
            }  # fmt: skip
        found.append(row)
    return found


async def rates(
    processes: Processes, subjects: list[Subject], seconds: float, repetitions: int
) -> list[dict[str, Any]]:
    """Per case and subject: requests per second of 32 connections, and per processor second; medians."""
    found = []
    for case in CASES:
        seen: dict[str, list[tuple[float, float]]] = {}
        for _ in range(repetitions):
            for subject in subjects:
                body = case.body()
                plain = post(CHAT, body)
                offset = subject.turns

                def request(n: int, subject: Subject = subject, plain: bytes = plain, offset: int = offset) -> bytes:
                    if not subject.named:
                        return plain
                    return plain.replace(
                        b"Host: 127.0.0.1",
                        f"Host: 127.0.0.1\r\nX-Session-Id: {subject.session(offset + n)}".encode(),
                        1,
                    )

                with measured(processes, subject.process) as taken:
                    rate = await as_fast_as_answered(subject.port, 32, seconds, request)
                subject.turns += int(rate * seconds) + 64
                seen.setdefault(subject.name, []).append((rate, rate * taken["seconds"] / max(taken["cpu_s"], 1e-3)))
        found.append(
            {"case": str(case)}
            | {
                name: {
                    "per_s": round(statistics.median(r for r, _ in s)),
                    "per_core_s": round(statistics.median(c for _, c in s)),
                }
                for name, s in seen.items()
            }
        )
    return found


async def streams(processes: Processes, port: int, clients: int, steps: int) -> dict[str, Any]:
    """Tokens per second of one gateway to `clients` clients. A step has one token for each; steps come as fast as they
    are read."""
    connections = [await connect(port) for _ in range(clients)]
    body = Case("small", True).body(max_tokens=steps, top_k=TOGETHER)
    with measured(processes, "gateway") as taken:
        answers = await asyncio.gather(
            *(c.send(post(CHAT, body, X_Session_Id=f"flood-{i}")) for i, c in enumerate(connections))
        )
    for connection in connections:
        connection.transport.close()
    tokens = clients * steps
    shortest = min(a.events for a in answers)
    took = max(a.total_s for a in answers) - min(a.first_s for a in answers)
    return {
        "clients": clients, "tokens": tokens, "events_of_the_shortest": shortest,
        "tokens_per_s": round(tokens / took), "tokens_per_core_s": round(tokens / taken["cpu_s"]),
    }  # fmt: skip


async def memory(processes: Processes, port: int, count: int) -> dict[str, Any]:
    """Bytes of the gateway's memory per open stream that waits for its next token."""
    body = Case("small", True).body(top_k=HELD)

    async def opened(number: int) -> Connection:
        connection = await connect(port)
        connection.send(post(CHAT, body, X_Session_Id=f"held-{number}")).add_done_callback(lambda f: f.exception())
        return connection

    before, held = processes.rss_bytes("gateway"), []
    for start in range(0, count, 50):
        held += await asyncio.gather(*(opened(n) for n in range(start, start + 50)))
        await asyncio.sleep(0.1)
    await asyncio.sleep(1.0)
    after = processes.rss_bytes("gateway")
    for connection in held:
        connection.transport.close()
    await asyncio.sleep(1.0)
    return {"streams": count, "bytes_a_stream": round((after - before) / count)}


async def hints(processes: Processes, port: int, seconds: float) -> dict[str, Any]:
    """Advisories per second, with 1 and 16 per request, and per second of the gateway's processor time."""
    found: dict[str, Any] = {}
    for each in (1, 16):

        def request(n: int, each: int = each) -> bytes:
            made = [{"session_id": f"typing-{(n * each + i) % 2000}"} for i in range(each)]
            return post(ADVISE, made[0] if each == 1 else {"advisories": made})

        with measured(processes, "gateway") as taken:
            rate = each * await as_fast_as_answered(port, 16, seconds, request)
        found[f"{each} a request"] = {
            "per_s": round(rate),
            "per_core_s": round(rate * taken["seconds"] / taken["cpu_s"]),
        }
    return found
