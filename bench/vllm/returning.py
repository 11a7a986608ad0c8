"""What a returning session waits for, by the place of its KV: vLLM alone, over LMCache, and over Upbeat's tiers.

Each server's own cache holds one session, so another session makes it forget. Our stack is restarted twice: first its
nodes have the sessions on SSD only, then in the blob tier only.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import shutil
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import servers
from asking import ANSWER_TOKENS, NEW_TOKENS, Server, Talk, Turn, WrongAnswer
from memcpy import Copier
from rich.console import Console

from loadtest.client import Endpoint, advise
from loadtest.compare.targets import Programs
from loadtest.policies import fixed_answers
from loadtest.stack import Stack
from runtime.config_file import load_config

#: Names of the arms.
OWN, COMPUTED = "vLLM, its own cache", "vLLM, recomputed"
LMCACHE, LMCACHE_DISK = "LMCache, memory", "LMCache, disk"
OURS_OWN, DRAM, SSD, OTHER, BLOB = "vLLM's own cache", "DRAM", "SSD", "the other node's SSD", "the blob tier"
_PHASES = {"ssd": (OURS_OWN, DRAM, SSD, OTHER), "blob": (BLOB,)}
_BARE_BLOB = "blob-without-chunks"
#: Seconds until LMCache has stored what was just computed.
_STORED_S = 2.0


def hinted(place: str) -> str:
    """The arm of a place with a hint."""
    return f"{place}, hinted"


@dataclass
class Samples:
    """The measured turns of one arm. read_bytes: what our node's store read for each, by source."""

    turns: list[Turn] = field(default_factory=list)
    phases: list[str] = field(default_factory=list)
    read_bytes: list[dict[str, int]] = field(default_factory=list)


@dataclass
class Arm:
    """prepare: brings the session's KV into place. turn: the measured one. node: whose store's reads are counted."""

    name: str
    prepare: Callable[[int], Awaitable[None]]
    turn: Callable[[int], Awaitable[Turn]]
    node: int | None = None


@dataclass
class Setup:
    """The measurement's parameters, and what it found so far."""

    setting: servers.Setting
    tokens: int
    repeats: int
    lead_s: float
    names: list[str]
    scratch: Path
    console: Console
    found: dict[str, Samples] = field(default_factory=dict)
    copies_s: list[float] = field(default_factory=list)

    @property
    def copied_bytes(self) -> int:
        """KV of the seen tokens."""
        return self.tokens * self.setting.kv_token_bytes


def measure(s: Setup) -> None:
    """Fill `s.found` and `s.copies_s`. Raises StackError, WrongAnswer."""
    config = json.loads((s.setting.model / "config.json").read_text())
    piece_bytes = servers.OUR_BLOCK_TOKENS * s.setting.kv_token_bytes // config["num_hidden_layers"]
    copier = Copier(config["num_hidden_layers"], s.tokens // servers.OUR_BLOCK_TOKENS, piece_bytes)
    with ExitStack() as running:
        urls = {name: running.enter_context(_started(s, name)) for name in s.names if name != "upbeat"}
        if "upbeat" not in s.names:
            asyncio.run(_phase(s, urls, None, "peers", copier))
            return
        stack = Stack(
            nodes=2,
            hbm_gib=servers.hbm_gib(s.setting),
            dram_gib=s.setting.dram_gib,
            directory=s.scratch / "stack",
            settings=(settings := servers.upbeat_settings(s.setting, servers.wrapper(s.setting, share=False))),
            ready_s=900.0,
        )
        s.console.print("two nodes of Upbeat over vLLM start")
        running.enter_context(stack)
        asyncio.run(_phase(s, urls, stack, "begin", copier))
        for phase in _PHASES:
            s.console.print(f"the stack stops, writes back, and starts again for: {', '.join(_PHASES[phase])}")
            stack.stop()
            if phase == "blob":
                for number in range(stack.nodes):
                    shutil.rmtree(_places(stack, number).ssd, ignore_errors=True)
                stack.start(settings)
            else:
                stack.start(settings | {"kv": settings["kv"] | {"blob_url": _blob_without_chunks(stack)}})
            asyncio.run(_phase(s, urls, stack, phase, copier))


@contextlib.contextmanager
def _started(s: Setup, name: str) -> Iterator[list[str]]:
    """A peer's addresses: vLLM's, and then LMCache's HTTP if it has one."""
    alone = replace(s.setting, instances=1)
    if name == "vllm":
        data = servers.bare(alone)
    else:
        disk = s.scratch / "lmcache" if name == "lmcache-disk" else None
        chunk = servers.DISK_CHUNK_TOKENS if disk else servers.PEER_BLOCK_TOKENS
        data = servers.lmcache(alone, disk=disk, chunk_tokens=chunk)
        data["start"][0]["serves"] = "http://127.0.0.1:${port2}"
        if disk is not None:
            disk.mkdir(parents=True)
    s.console.print(f"{name} starts")
    with Programs(servers.target_file(name, data), s.scratch) as programs:
        yield programs.addresses[::-1]


async def _phase(s: Setup, urls: dict[str, list[str]], stack: Stack | None, phase: str, copier: Copier) -> None:
    body = fixed_answers(s.setting.model)
    longest = s.setting.longest_tokens
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=900)) as http:
        peers = {name: Server(http, found[0], servers.MODEL, body, longest) for name, found in urls.items()}
        nodes = []
        if stack is not None:
            nodes = [
                Server(http, stack.url, servers.MODEL, body, longest, f"node-{number}") for number in range(stack.nodes)
            ]
        if phase in ("begin", "peers"):
            await _begin(s, peers, nodes)
        else:
            for node in nodes:
                await node.evict()
                await node.evict()
        if phase == "begin":
            return
        arms = _peer_arms(s, peers, urls, phase)
        if stack is not None:
            arms += await _our_arms(s, http, stack, nodes, phase)
        order = random.Random(5)
        for repeat in range(s.repeats):
            order.shuffle(arms)
            for arm in arms:
                await arm.prepare(repeat)
                before = _read_bytes(stack, arm.node)
                turn = await arm.turn(repeat)
                _keep(s, arm, phase, turn, before, _read_bytes(stack, arm.node))
            s.copies_s.append(copier.seconds())
            s.console.print(f"{phase}: repeat {repeat + 1} of {s.repeats}")


def _keep(s: Setup, arm: Arm, phase: str, turn: Turn, before: dict[str, int], after: dict[str, int]) -> None:
    samples = s.found.setdefault(arm.name, Samples())
    samples.turns.append(turn)
    samples.phases.append(phase)
    if arm.node is not None:
        samples.read_bytes.append({source: n - before.get(source, 0) for source, n in after.items()})


def _talks(s: Setup) -> list[Talk]:
    """Our sessions. Those of the arms SSD and OTHER come first, one a repeat, hinted and not; the last one stays."""
    return [Talk(f"returning-{number}", number, s.tokens) for number in range(4 * s.repeats + 1)]


async def _begin(s: Setup, peers: dict[str, Server], nodes: list[Server]) -> None:
    """Warm every server up, and run the first turns: the peers' of one session, ours of all on node 0."""
    for server in [*peers.values(), *nodes]:
        await server.evict()
        await server.evict()
    talk = Talk("returning", 99, s.tokens)
    for server in peers.values():
        await server.ask(talk.name, talk.again())
    if nodes:
        talks = _talks(s)
        s.console.print(f"{len(talks)} sessions begin on node 0")
        for talk in talks:
            await nodes[0].ask(talk.name, talk.again())
    await asyncio.sleep(_STORED_S)


def _peer_arms(s: Setup, peers: dict[str, Server], urls: dict[str, list[str]], phase: str) -> list[Arm]:
    talk = Talk("returning", 99, s.tokens)

    def turn_of(server: Server) -> Callable[[int], Awaitable[Turn]]:
        async def turn(_: int) -> Turn:
            return await server.ask(talk.name, talk.again())

        return turn

    def warm(server: Server) -> Callable[[int], Awaitable[None]]:
        async def prepare(_: int) -> None:
            await server.ask(talk.name, talk.again())
            await asyncio.sleep(s.lead_s)

        return prepare

    def forgotten(server: Server) -> Callable[[int], Awaitable[None]]:
        async def prepare(_: int) -> None:
            await server.evict()
            await asyncio.sleep(s.lead_s)

        return prepare

    def on_disk(server: Server, url: str) -> Callable[[int], Awaitable[None]]:
        async def prepare(_: int) -> None:
            await server.evict()
            await asyncio.sleep(_STORED_S)
            await server.post(f"{url}/cache/clear")
            leave_page_cache(s.scratch / "lmcache")
            await asyncio.sleep(s.lead_s)

        return prepare

    made = []
    if "vllm" in peers:
        server = peers["vllm"]
        made += [Arm(OWN, warm(server), turn_of(server))]
        # The session is asked for on this server in the arm above: after an eviction it is computed again.
        made += [Arm(COMPUTED, forgotten(server), turn_of(server))] if phase != "blob" else []
    if "lmcache" in peers:
        made += [Arm(LMCACHE, forgotten(peers["lmcache"]), turn_of(peers["lmcache"]))]
    if "lmcache-disk" in peers and phase != "blob":
        server = peers["lmcache-disk"]
        made += [Arm(LMCACHE_DISK, on_disk(server, urls["lmcache-disk"][1]), turn_of(server))]
    return made


async def _our_arms(s: Setup, http: aiohttp.ClientSession, stack: Stack, nodes: list[Server], phase: str) -> list[Arm]:
    talks, endpoint = _talks(s), Endpoint(stack.url, servers.MODEL)
    staying = talks.pop()

    async def told(talk: Talk, node: Server) -> None:
        status = await advise(http, endpoint, talk.name, s.lead_s, pin_node=node.node)
        if status != 202:
            raise WrongAnswer(f"the hint of {talk.name} was answered {status}; see {stack.log}")

    def arm(place: str, hint: bool) -> Arm:
        node = nodes[1 if place == OTHER else 0]
        group = {SSD: 0, OTHER: 2, BLOB: 0}.get(place, 0) + (1 if hint else 0)

        def talk_of(repeat: int) -> Talk:
            return staying if place in (DRAM, OURS_OWN) else talks[4 * repeat + group]

        async def prepare(repeat: int) -> None:
            talk = talk_of(repeat)
            if place in (DRAM, OURS_OWN):
                await node.ask(talk.name, talk.again())
            if place != OURS_OWN:
                await node.evict()
            if place in (SSD, OTHER, BLOB):
                await asyncio.sleep(_STORED_S)
                leave_page_cache(stack.data)
            if hint:
                await told(talk, node)
            await asyncio.sleep(s.lead_s)

        async def turn(repeat: int) -> Turn:
            talk = talk_of(repeat)
            return await node.ask(talk.name, talk.again())

        return Arm(f"Upbeat, {hinted(place) if hint else place}", prepare, turn, int(str(node.node).rpartition("-")[2]))

    return [arm(place, hint) for place in _PHASES[phase] for hint in ((False,) if place == OURS_OWN else (False, True))]


def leave_page_cache(folder: Path) -> None:
    """Drop the files below `folder` from the page cache, so that the SSD is read."""
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            if path.is_file():
                fd = os.open(path, os.O_RDONLY)
                try:
                    os.fsync(fd)
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                finally:
                    os.close(fd)


def _places(stack: Stack, number: int) -> Any:
    config = load_config(stack.config_file, {"data": str(stack.data), "nodes": {"count": stack.nodes}})
    return config.node(number)


def _blob_without_chunks(stack: Stack) -> str:
    """A blob tier that has the sessions' manifests but no KV."""
    folder = stack.directory / _BARE_BLOB
    shutil.copytree(stack.data / "blob" / "v3" / "manifests", folder / "manifests")
    return folder.as_uri()


def _read_bytes(stack: Stack | None, number: int | None) -> dict[str, int]:
    """Bytes that a node's store has loaded since its start, by source, from its metrics."""
    if stack is None or number is None:
        return {}
    lines = stack.metrics(_places(stack, number).store_metrics_port).splitlines()
    found = (re.fullmatch(r'upbeat_kvstore_read_bytes_total\{source="(\w+)"\} (.+)', line) for line in lines)
    return {match[1]: int(float(match[2])) for match in found if match}


def longest_tokens(tokens: int) -> int:
    """The longest request's tokens: a session's, in whole blocks of every arm."""
    block = servers.OUR_BLOCK_TOKENS
    return -(-(tokens + NEW_TOKENS + ANSWER_TOKENS) // block) * block
