"""`python -m worker.measure.make_profile`: measures this worker's model on this machine, for `upbeat profile`.

Loads the model, computes with the runner of a worker of this configuration, and loads KV from the configuration's
stores, which the caller has started for this alone. Writes one profile (contracts.latency_profile) and prints its
progress to stdout.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import platform
import queue
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from contracts import identity
from contracts.corun import CorunFit
from contracts.errors import ConfigError
from contracts.latency_profile import LoadRate, Profile, encode
from contracts.v1 import kvstore_pb2, kvstore_pb2_grpc
from runtime import rpc, telemetry
from runtime.clock import RealClock
from runtime.config import Config
from runtime.config_file import load_config
from runtime.sections import GIB
from runtime.service import Tasks, run
from storelink.link import StoreLink
from worker.core.granules import Owner, Use
from worker.core.hbm import HbmCache
from worker.core.pages import PagePool
from worker.devices.device import Device, choose_device
from worker.devices.runner import Steps
from worker.engine.executor import Executor
from worker.link.ends import end_of
from worker.link.kv_loader import KvLoader
from worker.link.loads import LoadTable
from worker.measure.corun import QUICK_CORUN, CorunGrid, measure_corun
from worker.measure.initial_pace import compute_threads, profile_of, subject
from worker.measure.loads import LoadFailed, Mover, large_chunks, own_rates, peer_rate
from worker.measure.steps import QUICK, Computed, Grid, on_free_pages
from worker.memory.copier import Copier
from worker.memory.paged_kv import PagedKv
from worker.models.load import Model, load_model

_FLUSH_S = 120.0
_PACKAGES = {"upbeat": "upbeat-server", "torch": "torch", "numpy": "numpy"}


@dataclass(slots=True)
class Computer:
    """A model, its pages and its runner, as in a worker."""

    model: Model
    kv: PagedKv
    runner: Steps
    chosen: Device
    threads: int


def assemble(config: Config) -> Computer:
    """Load the model. Raises ConfigError, as at a worker's start."""
    threads = compute_threads(config)
    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    granule, w = config.worker.granule_bytes, config.worker
    chosen = choose_device(config, threads)
    memory, digests = chosen.memory, config.run_dir / "digests"
    model = load_model(config.model, memory, w.dtype, w.device, config.kv.chunk_tokens, digests, chosen.pack)
    kv = PagedKv.reserve(
        memory, model.shape, max(memory.free * granule // model.shape.piece_bytes, 1), Owner(Use.KV, config.model.name)
    )
    runner, _ = chosen.movers(model, kv)
    return Computer(model, kv, runner, chosen, threads)


def measure_compute(computer: Computer, config: Config, quick: bool, say: Callable[[str], None]) -> Computed:
    """Measure the whole grid, on pages of an unused cache."""
    grid = (QUICK if quick else Grid()).within(
        config.worker.max_batch, config.worker.step_tokens, computer.model.max_tokens
    )
    return on_free_pages(computer.runner, computer.kv, grid, RealClock(), say)


class Attachment:
    """A mover attached to one node's store, with its own pages over `kv`."""

    def __init__(self, config: Config, node: int, kv: PagedKv, copier: Copier, pool: PagePool, tasks: Tasks) -> None:
        places, inbox, log = config.node(node), queue.SimpleQueue[object](), telemetry.logger("storelink.link")
        table = LoadTable()
        loader = KvLoader(kv, table, inbox.put, copier)
        executor = Executor(
            kv.shape, kv, HbmCache(pool), table, loader, RealClock(), config.kv, lambda tenant: bytes(32)
        )
        executor.link = loader.link = StoreLink(
            places.store_address,
            "profile",
            [end_of(kv.shape, inbox.put, loader.from_store)],
            log,
            config.kv.hugepages,
            node=places.name,
        )
        loader.start()
        tasks.start(executor.link.run(), f"store link {node}")
        self.mover = Mover(executor, inbox, large_chunks(kv.shape, int(config.kv.dram_gib * GIB)))
        self._loader, self._places, self._loop = loader, places, asyncio.get_running_loop()

    def flush(self) -> None:
        """Wait until the store has finished its write-back. Not on the event loop's thread. Raises LoadFailed."""
        if not asyncio.run_coroutine_threadsafe(self._flush(), self._loop).result():
            raise LoadFailed("the store did not finish its write-back")

    async def _flush(self) -> bool:
        channel = rpc.channel(self._places.store_address, identity.node(self._places.name))
        try:
            stub: Any = kvstore_pb2_grpc.KvStoreStub(channel)  # type: ignore[no-untyped-call]
            return bool((await stub.Flush(kvstore_pb2.FlushRequest(timeout_s=_FLUSH_S))).complete)
        finally:
            await channel.close(None)

    def stop(self) -> None:
        """End the copy threads."""
        self._loader.stop()


async def measure_loads(
    config: Config, kv: PagedKv, chosen: Device, repetitions: int, say: Callable[[str], None]
) -> dict[str, LoadRate]:
    """Rates by source; from a peer only where the configuration has two nodes. No slab of `kv` may be mapped."""
    tasks = Tasks()
    # One page ledger for all attachments, which run one after the other.
    pool = PagePool(kv.slab_count, kv.pages_per_slab, kv.shape.layers)
    nodes = [Attachment(config, n, kv, chosen.copier(kv), pool, tasks) for n in range(min(2, config.nodes.count))]
    try:
        for node in nodes:
            await asyncio.to_thread(node.mover.attached)
        ssd = config.node(0).ssd
        found = await asyncio.to_thread(own_rates, nodes[0].mover, nodes[0].flush, ssd, repetitions, say)
        if len(nodes) > 1:
            owner, name = nodes[0], config.node(0).name
            found["peer"] = await asyncio.to_thread(
                peer_rate, owner.mover, nodes[1].mover, name, owner.flush, repetitions, say
            )
        return found
    finally:
        for node in nodes:
            node.stop()
        await tasks.cancel()


async def measure(config: Config, quick: bool, corun: bool, say: Callable[[str], None]) -> Profile:
    """Measure the whole profile. corun: also steps beside training. Raises ConfigError if the model cannot be loaded,
    LoadFailed if a store fails."""
    computer = assemble(config)
    shape, what = computer.model.shape, subject(computer.model.shape, computer.threads, computer.chosen.computes)
    say(
        f"{config.served_model}: {shape.layers} layers, {what.dtype}, {what.computes}, {what.threads} threads, "
        f"{what.device}"
    )
    computed = await asyncio.to_thread(measure_compute, computer, config, quick, say)
    beside = await asyncio.to_thread(_measure_corun, computer, config, quick, say) if corun else None
    loads = await measure_loads(config, computer.kv, computer.chosen, 3 if quick else 7, say) if config.kv.cache else {}
    versions = {name: importlib.metadata.version(package) for name, package in _PACKAGES.items()} | {
        "python": platform.python_version()
    }
    whole = profile_of(what, config.served_model, shape, computed)
    today = datetime.now(UTC).date().isoformat()
    return replace(whole, loads=loads, versions=versions, measured_on=today, corun=beside)


def _measure_corun(computer: Computer, config: Config, quick: bool, say: Callable[[str], None]) -> CorunFit:
    grid = QUICK_CORUN if quick else CorunGrid()
    return measure_corun(
        computer.model,
        config.model,
        computer.kv,
        computer.runner,
        computer.chosen,
        config.run_dir / "digests",
        grid,
        config.worker.max_batch,
        say,
    )


async def _main(given: argparse.Namespace) -> int:
    telemetry.configure_logs("profiling", "warning")
    try:
        config = load_config(given.config)
        profile = await measure(config, given.quick, given.corun, lambda line: print(line, flush=True))
        given.out.write_text(encode(profile))
    except (ConfigError, LoadFailed, OSError) as error:
        print(f"upbeat: {error}", file=sys.stderr, flush=True)
        return 2 if isinstance(error, ConfigError) else 1
    return 0


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(prog=".venv/bin/python -m worker.measure.make_profile", description=__doc__)
    parser.add_argument(
        "--config", type=Path, required=True, help="the configuration that the stores were started with, too"
    )
    parser.add_argument("--out", type=Path, required=True, help="where the profile goes")
    parser.add_argument("--quick", action="store_true", help="fewer points and repetitions")
    parser.add_argument("--corun", action="store_true", help="also steps beside fine-tuning")
    run(_main(parser.parse_args()))


if __name__ == "__main__":
    main()
