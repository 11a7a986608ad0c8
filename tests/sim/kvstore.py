"""Random scenarios for the KV store's core: `python -m tests.sim.kvstore --scenarios 100000 --seed 0 --jobs 2`.

A scenario is a pure function of its seed: some nodes with tiny arenas, their workers, a blob tier, sessions of two
models, a minute of turns, hints, erasures and faults, then quiet. Nothing wrong may be served at any time, every load
ends exactly once, and when all is quiet nothing is pinned, reserved or waiting, and what was erased is gone.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor

from contracts.ids import SessionKey
from contracts.kv import KvShape
from kvstore.core import events as ev
from kvstore.core.store import Store
from tests.sim.node import SimNode
from tests.sim.worker import Session, SimWorker
from tests.sim.world import PAGE, World, Wrong

#: Slots of one page and of three.
SHAPES = [KvShape.of_heads(b"a" * 32, 4, 1, 16, 32, "float32"), KvShape.of_heads(b"b" * 32, 3, 1, 32, 48, "float32")]
_ACTIVE_S, _QUIET_S = 20.0, 200.0
_CHUNKS = 5


class Scenario:
    """See the module. `store` and `node` may be classes with a planted fault."""

    def __init__(self, seed: int, store: type[Store] = Store, node: type[SimNode] = SimNode) -> None:
        self.world = World(seed)
        r = self.world.random
        granule = r.choice([PAGE, 2 * PAGE, 4 * PAGE])
        pages = r.choice([16, 24, 32, 64])
        limit = r.choice([1 << 15, 1 << 17])
        self.nodes = [
            node(self.world, f"node-{n}", pages * PAGE, granule, limit, store) for n in range(r.choice([1, 2, 2, 3, 4]))
        ]
        for n in self.nodes:
            n.others = {other.name: other for other in self.nodes if other is not n}
        self.sessions = [self._session(i) for i in range(4)]
        self._lives = 0
        self.workers = [self._attach(n) for n in self.nodes for _ in range(r.choice([1, 1, 2]))]
        for _ in range(r.randint(8, 24)):
            self.world.at(r.uniform(0, _ACTIVE_S), self._act)

    def _session(self, i: int) -> Session:
        shape = SHAPES[i // 3]
        shared = 2 if i < 2 else 0  # as of a common system prompt
        keys = [bytes([200 if n < shared else i, n]) * 16 for n in range(_CHUNKS)]
        return Session(SessionKey("t", f"s{i}"), shape, keys)

    def _attach(self, node: SimNode) -> SimWorker:
        self._lives += 1
        return SimWorker(self.world, node, f"worker-{self._lives}", self.sessions)

    # ---- what happens

    def _act(self) -> None:
        r = self.world.random
        actions = [self._turn, self._prefetch, self._hint, self._invalidate, self._cancel, self._erase, self._fault]
        r.choices(actions, [12, 4, 5, 2, 2, 1, 5])[0]()

    def _some_worker(self) -> SimWorker | None:
        alive = [w for w in self.workers if w.alive]
        return self.world.random.choice(alive) if alive else None

    def _some_session(self) -> Session | None:
        alive = [s for s in self.sessions if s.erased is None]
        return self.world.random.choice(alive) if alive else None

    def _sources(self, worker: SimWorker) -> tuple[str, ...]:
        names = list(worker.node.others)
        self.world.random.shuffle(names)
        return tuple(names[: self.world.random.randint(0, 2)])

    def _turn(self) -> None:
        worker, session = self._some_worker(), self._some_session()
        if worker is not None and session is not None:
            worker.load(session, self.world.random.randint(1, _CHUNKS), ev.LoadKind.DEMAND, self._sources(worker))

    def _prefetch(self) -> None:
        worker, session, r = self._some_worker(), self._some_session(), self.world.random
        if worker is not None and session is not None:
            layers = r.choice([(), (), (0,), (1, 2)])
            worker.load(session, r.randint(1, _CHUNKS), ev.LoadKind.PREFETCH, self._sources(worker), layers)

    def _hint(self) -> None:
        worker, session, r = self._some_worker(), self._some_session(), self.world.random
        if worker is not None and session is not None:
            arrival = r.choice([0.0, 1.0, 30.0])
            lifetime = r.choice([0.5, 5.0, 60.0])
            worker.node.handle(
                ev.Advised(session.key, r.randint(-1, 1), arrival, lifetime, self._sources(worker), self.world.now)
            )

    def _invalidate(self) -> None:
        worker, session = self._some_worker(), self._some_session()
        if worker is not None and session is not None:
            worker.node.handle(ev.Invalidated(session.key, self.world.now))

    def _cancel(self) -> None:
        worker = self._some_worker()
        running = [ident for ident, turn in worker.turns.items() if turn.ended is None] if worker is not None else []
        if worker is not None and running:
            worker.cancel(self.world.random.choice(running))

    def _erase(self) -> None:
        session = self._some_session()
        if session is None:
            return
        session.erased = self.world.now
        session.clean = not self.world.blob.away and not self.world.cut and all(n.alive for n in self.nodes)
        for node in self.nodes:
            node.list_manifests()
        manifests = [node.store.index.manifests.get(session.key) for node in self.nodes]
        session.named = tuple(key for key in session.keys if all(m is not None and key in m.keys for m in manifests))
        for node in self.nodes:
            node.handle(ev.SessionErased(session.key, self.world.now))

    def _fault(self) -> None:
        r = self.world.random
        node = r.choice(self.nodes)
        r.choice([self._crash, self._lose_worker, self._cut, self._blob_away, self._disk_full])(
            node, r.uniform(0.1, 8.0)
        )

    def _unclean(self) -> None:
        """An erasure may not reach everything."""
        for session in self.sessions:
            session.clean = session.clean and session.erased is None

    def _crash(self, node: SimNode, seconds: float) -> None:
        if not node.alive:
            return
        self._unclean()
        node.crash()

        def restart() -> None:
            self._unclean()
            node.start()
            self.workers.append(self._attach(node))

        self.world.at(seconds, restart)

    def _lose_worker(self, node: SimNode, seconds: float) -> None:
        for worker in [w for w in self.workers if w.node is node and w.alive][:1]:
            worker.detach()
            self.world.at(seconds, lambda: self.workers.append(self._attach(node)) if node.alive else None)

    def _cut(self, node: SimNode, seconds: float) -> None:
        if node.others:
            link = (node.name, self.world.random.choice(list(node.others)))
            self._unclean()
            self.world.cut.add(link)
            self.world.at(seconds, lambda: self.world.cut.discard(link))

    def _blob_away(self, node: SimNode, seconds: float) -> None:
        self._unclean()
        self.world.blob.away = True
        self.world.at(seconds, self._blob_back)

    def _blob_back(self) -> None:
        self.world.blob.away = False

    def _disk_full(self, node: SimNode, seconds: float) -> None:
        node.full = True

        def empty() -> None:
            node.full = False

        self.world.at(seconds, empty)

    # ---- the end

    def run(self) -> int:
        """How many events the nodes handled. Raises AssertionError or IllegalTransition when something is wrong."""
        self.world.run(_ACTIVE_S + 30.0)
        self.world.faulty = False
        for old in (False, True, True):  # nobody's chunks leave the blob tier when they were seen so twice
            for node in self.nodes:
                node.catch_up()
                node.handle(ev.OrphansSought(self.world.now))
                if old:
                    node.list_old_chunks()
            self.world.run(self.world.now + _QUIET_S / 2)
        for worker in self.workers:
            for turn in worker.turns.values():
                if worker.alive and not turn.cancelled and turn.ended is None:
                    raise Wrong(f"a load of {worker.name} never ended")
        for node in self.nodes:
            for owner in list(node.owners):
                if owner.startswith("peer-"):
                    raise Wrong(f"{owner} still has a lease")
            if node.store.saves.waiting_bytes:
                raise Wrong(f"{node.name} still waits for {node.store.saves.waiting_bytes} bytes to be written")
            if not node.store.ledger.idle:
                raise Wrong(f"slots of {node.name} are still pinned or reserved")
        for worker in self.workers:
            worker.detach()
        self.world.run(self.world.now + 100.0)
        for node in self.nodes:
            if node.store.loads.count or not node.store.ledger.idle:
                raise Wrong(f"{node.name} still has loads")
            self._check_erased(node)
        return self.world.events

    def _check_erased(self, node: SimNode) -> None:
        # What a session says next, and what it said in a turn that ended: its history may have been edited since.
        named = {key for s in self.sessions if s.erased is None for key in s.keys}
        named.update(key for manifest in self.world.blob.manifests.values() for key in manifest.keys)
        for session in self.sessions:
            if session.erased is None or not session.clean:
                continue
            if session.key in node.store.index.manifests or session.key in self.world.blob.manifests:
                raise Wrong(f"the manifest of the erased {session.key} is still there")
            for key in set(session.named) - named:
                chunk = node.store.index.chunks.get(key)
                if chunk is not None or key in node.ssd or key in self.world.blob.chunks:
                    raise Wrong(
                        f"{key[:2].hex()} of the erased {session.key} is still there: {node.name} "
                        f"{key in node.ssd} {chunk}"
                    )


def run_one(seed: int, store: type[Store] = Store, node: type[SimNode] = SimNode) -> tuple[int, str]:
    """(events, what went wrong or nothing)."""
    scenario: Scenario | None = None
    try:
        scenario = Scenario(seed, store, node)
        return scenario.run(), ""
    except Exception as e:
        events = scenario.world.events if scenario is not None else 0
        return events, f"{type(e).__name__}: {e}"


def _run_some(seeds: range) -> list[tuple[int, int, str]]:
    return [(seed, *run_one(seed)) for seed in seeds]


def run_many(first: int, count: int, jobs: int) -> tuple[int, list[tuple[int, str]]]:
    """(events, failures by seed) of `count` scenarios."""
    batches = [range(start, min(start + 200, first + count)) for start in range(first, first + count, 200)]
    events, failures = 0, []
    with ProcessPoolExecutor(jobs) as pool:
        for batch in pool.map(_run_some, batches):
            events += sum(e for _, e, _ in batch)
            failures += [(seed, wrong) for seed, _, wrong in batch if wrong]
            for seed, wrong in [(seed, wrong) for seed, _, wrong in batch if wrong][:3]:
                print(f"seed {seed}: {wrong}\n  python -m tests.sim.kvstore --scenarios 1 --seed {seed}", flush=True)
    return events, failures


def main() -> int:
    parser = argparse.ArgumentParser(description="Random scenarios for the KV store's core")
    parser.add_argument("--scenarios", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="of the first scenario; the others follow")
    parser.add_argument("--jobs", type=int, default=1)
    args = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":
        # The order of sets of bytes depends on it, and a seed must mean the same everywhere.
        os.execve(
            sys.executable,
            [sys.executable, "-m", "tests.sim.kvstore", *sys.argv[1:]],
            {**os.environ, "PYTHONHASHSEED": "0"},
        )
    began = time.perf_counter()
    events, failures = run_many(args.seed, args.scenarios, args.jobs)
    seconds = time.perf_counter() - began
    print(
        f"{args.scenarios} scenarios from seed {args.seed}: {events} events, {len(failures)} failures, {seconds:.1f} s"
    )
    print("failed seeds: " + " ".join(str(seed) for seed, _ in failures[:50]) if failures else "nothing wrong")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
