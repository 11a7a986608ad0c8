"""Two nodes, each a store and a vLLM server with the connector; a vLLM server without one; and what they are asked.

vLLM itself answers differently where it computes in another batch: its sums have another order. So a first difference
is an error only where the two best tokens are clearly apart.
"""

from __future__ import annotations

import random
import re
import signal
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runtime.config_file import cluster_secret, dump_config, load_config
from storelink.arena_sharing import arenas_of
from tests.kvstore.conftest import Stack
from tests.vllm_plugin.vllm_server import Answer, VllmServer

#: Between the two best tokens; below it vLLM may choose either.
CLEAR_GAP = 1e-3
#: Requests at a time.
CONCURRENT = 8
_HITS = re.compile(r'upbeat_kvstore_hit_bytes_total\{tier="(\w+)"\} ([0-9.e+]+)')
_DAMAGED = re.compile(r"upbeat_kvstore_checksum_failures_total\{[^}]*\} ([0-9.e+]+)")


@dataclass
class Tally:
    """Answers compared with those of the server that computes all."""

    asked: int = 0
    alike: int = 0
    #: Of answers that differ: by how much the first other token was the best.
    gaps: list[float] = field(default_factory=list)

    def add(self, found: Answer, expected: Answer, where: str) -> None:
        """Raises AssertionError for a difference where two tokens are not level."""
        self.asked += 1
        for at, (ours, theirs) in enumerate(zip(found.tokens, expected.tokens, strict=True)):
            if ours != theirs:
                gap = expected.gap(at)
                assert gap < CLEAR_GAP, f"{where}: token {at} is {ours}, not {theirs}, by {gap}"
                self.gaps.append(gap)
                return
        self.alike += 1

    def __str__(self) -> str:
        gaps = ", ".join(f"{gap:.1e}" for gap in sorted(self.gaps, reverse=True))
        return f"{self.asked} answers, {self.alike} alike" + (f", others at gaps of {gaps}" if gaps else "")


@dataclass
class World:
    """See the module. records: what `checked_connector` writes."""

    folder: Path
    first_port: int
    model: Path
    stack: Stack
    records: Path
    servers: list[VllmServer] = field(default_factory=list)
    tally: Tally = field(default_factory=Tally)
    _known: dict[tuple[int, ...], Answer] = field(default_factory=dict)

    def start(
        self, node: int | None, *more: str, environment: dict[str, str] | None = None, compiled: bool = False
    ) -> VllmServer:
        """Start a server over this node's store; None: one without a connector. It must be waited for."""
        number, extra = len(self.servers), None
        if node is not None:
            secret, cache = self.folder / "data" / "secret", self.folder / "cache"
            extra = {"store": self.stack.address(node), "secret": str(secret), "cache": str(cache), "device": number}
        self.servers.append(
            VllmServer(
                self.model,
                self.first_port + number,
                self.folder / f"vllm-{number}.log",
                extra,
                *more,
                environment=environment,
                compiled=compiled,
                records=self.records if extra else None,
            )
        )
        return self.servers[-1]

    def expected(self, bare: VllmServer, tokens: Sequence[int]) -> Answer:
        """What the server without a connector answers."""
        key = tuple(tokens)
        if key not in self._known:
            self._known[key] = bare.complete(list(tokens), "none")
        return self._known[key]

    def hits(self, node: int) -> Counter[str]:
        """Bytes that requests found in this store since it started, by tier, and `damaged`: pieces that were not what
        was written."""
        host, _, port = self.stack.address(node).rpartition(":")
        text = urllib.request.urlopen(f"http://{host}:{int(port) + 4}/metrics", timeout=20).read().decode()
        found = Counter({tier: int(float(value)) for tier, value in _HITS.findall(text)})
        found["damaged"] = sum(int(float(value)) for value in _DAMAGED.findall(text))
        return found

    def await_store(self, node: int) -> None:
        """Until it has an arena, and servers have had time to attach."""
        until(lambda: arenas_of(self.stack.config.node(node).arena_stem), 30)
        time.sleep(3.0)

    def end_store(self, node: int) -> list[Path]:
        """End it in good order; the objects on its SSD."""
        self.stack.signal(node, signal.SIGTERM)
        ssd = self.stack.config.node(node).ssd
        return sorted(path for path in ssd.rglob("*") if path.is_file() and path.stat().st_size > 4096)

    def restart_store(self, node: int) -> None:
        """After `end_store` or a kill."""
        self.stack.start(node)
        self.await_store(node)


@contextmanager
def world(folder: Path, first_port: int, model: Path, **kv: Any) -> Iterator[World]:
    """Two stores; servers are started with `World.start`. first_port: of 60."""
    config = load_config(
        None,
        {
            "model": str(model),
            "data": str(folder / "data"),
            "run_dir": str(folder / "run"),
            "nodes": {"base_port": first_port, "count": 2},
            "scheduler": {"port": first_port + 40},
            "gateway": {"port": first_port + 41},
            "kv": {"dram_gib": 0.125, **kv},
        },
    )
    for name in ("data", "records"):
        (folder / name).mkdir(parents=True)
    cluster_secret(folder / "data")
    (folder / "config.yaml").write_text(dump_config(config))
    made = World(folder, first_port + 42, model, Stack(config, folder / "config.yaml"), folder / "records")
    try:
        for node in range(2):
            made.stack.start(node)
        for node in range(2):
            until(lambda node=node: arenas_of(config.node(node).arena_stem), 60)  # type: ignore[misc]
        yield made
    finally:
        for server in made.servers:
            server.stop()
        made.stack.stop()


def until(true: Callable[[], Any], limit_s: float) -> None:
    """Wait for it."""
    end = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)


class Conversations:
    """Conversations of several turns; a turn's prompt holds the answers before it. The server without a connector
    answers all turns first."""

    def __init__(self, world: World, bare: VllmServer, count: int, turns: int, sizes: tuple[range, range]) -> None:
        """sizes: of a conversation's first prompt, and of what each later turn adds."""
        self.world, self.count, self.turns, self._sizes = world, count, turns, sizes
        self.prompts: list[list[list[int]]] = self._at_once(lambda number: self._compute(bare, number))
        self.expected = [[world.expected(bare, prompt) for prompt in prompts] for prompts in self.prompts]

    def _compute(self, bare: VllmServer, number: int) -> list[list[int]]:
        rng = random.Random(number)
        prompts, said = [], [rng.randrange(3, 2000) for _ in range(rng.choice(self._sizes[0]))]
        for _ in range(self.turns):
            prompts.append(list(said))
            said += self.world.expected(bare, said).tokens
            said += [rng.randrange(3, 2000) for _ in range(rng.choice(self._sizes[1]))]
        return prompts

    def _at_once(self, run: Callable[[int], Any]) -> list[Any]:
        with ThreadPoolExecutor(CONCURRENT) as pool:
            return list(pool.map(run, range(self.count)))

    def ask(
        self,
        what: str,
        server: VllmServer,
        turns: Sequence[int],
        sources: Sequence[str] = (),
        meanwhile: Callable[[int], None] | None = None,
    ) -> int:
        """Ask these turns of all conversations, several conversations at a time, and compare the answers. Returns how
        many tokens came from the store. meanwhile: called with each conversation's number before it."""
        tally, before, began = Tally(), server.hits()[1], time.monotonic()

        def run(number: int) -> list[Answer]:
            if meanwhile is not None:
                meanwhile(number)
            prompts = self.prompts[number]
            return [server.complete(prompts[turn], f"talk-{number}", sources=sources) for turn in turns]

        for number, answers in enumerate(self._at_once(run)):
            for turn, answer in zip(turns, answers, strict=True):
                for counted in (tally, self.world.tally):
                    counted.add(answer, self.expected[number][turn], f"{what}, conversation {number}, turn {turn}")
        loaded = int(server.hits()[1] - before)
        seconds = time.monotonic() - began
        print(f"{what}: {tally}; {loaded} tokens from the store; {seconds:.0f} s", flush=True)
        return loaded
