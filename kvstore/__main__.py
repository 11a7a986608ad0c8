"""`upbeat-kvstore --config FILE --node N`: one node's KV store. Wiring only."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

from contracts.cluster import secret_id
from contracts.errors import ConfigError
from contracts.v1.kvstore_pb2_grpc import add_KvStoreServicer_to_server
from kvstore import failpoints, upkeep
from kvstore.directory import Directory
from kvstore.leaving import Leaving, empty
from kvstore.metrics import log
from kvstore.node import StoreNode
from kvstore.server import Server
from kvstore.tiers import nixl
from runtime import rpc, service
from runtime.clock import RealClock
from runtime.config import Config
from runtime.config_file import cluster_secret
from runtime.directory_lock import DirectoryLock
from runtime.metrics_page import serve_metrics

DRAIN_S = 25.0
_STOP_S = 0.5


class KvStoreService:
    """What runtime.service drives."""

    def __init__(self, config: Config, number: int) -> None:
        self._config = config
        self._number = number
        self._tasks = service.Tasks()
        self.failed: asyncio.Future[None] = self._tasks.failed
        self.left = self._tasks.left

    async def start(self) -> None:
        """Serve as soon as the SSD is recovered; peers and the scheduler follow."""
        failpoints.arm(self._config.kv.failpoints)
        # First of all: a second store of this node must fail here, before it touches the first one's files.
        lock = DirectoryLock(self._config.node(self._number).directory / "lock", "store")
        try:
            await asyncio.to_thread(lock.take)
        except OSError as e:
            log.warning(
                "the node's directory cannot be locked: the SSD is not used until it can be",
                lock=str(lock.path),
                error=str(e),
            )
        self._grpc, self._health = rpc.server(self._config.node(self._number).store_listen, ["upbeat.v1.KvStore"])
        self._node = StoreNode(self._config, self._number, RealClock(), self._tasks, lock)
        self._leaving = Leaving(self._node, self._tasks)
        await self._node.start()
        add_KvStoreServicer_to_server(Server(self._node), self._grpc)  # type: ignore[no-untyped-call]
        await self._grpc.start()
        await rpc.set_serving(self._health, True)
        self._serve_metrics()
        self._tasks.start(self._report(), "directory")
        directory, bucket = self._node.sizes.blob_directory, self._config.kv.blob_url or str(self._config.data / "blob")
        self._tasks.start(self._keep_up(bucket, directory), "check owner")
        log.info("serving", address=self._node.places.store_listen, arena=str(self._node.arena.path))

    async def _keep_up(self, bucket: str, directory: Path | None) -> None:
        """Begin the background work on the blob tier, once it is known to be this fleet's."""
        node, kv = self._node, self._config.kv
        if not await upkeep.check_owner(node, secret_id(cluster_secret(self._config.data)), bucket):
            return
        self._tasks.start(upkeep.measure(node), "measure")
        self._tasks.start(upkeep.learn(node, self._tasks, directory), "learn")
        if kv.blob_expiry_s:
            self._tasks.start(upkeep.expire(node, kv.blob_expiry_s), "expire")
        self._tasks.start(upkeep.sweep(node, kv.orphan_grace_s, directory), "sweep")

    def _serve_metrics(self) -> None:
        """Serve Prometheus metrics. The store works without them."""
        places = self._node.places
        try:
            serve_metrics(places.store_listen.rpartition(":")[0], places.store_metrics_port)
        except OSError as e:
            log.warning("no metrics", error=str(e))

    async def _report(self) -> None:
        """Report to the schedulers once peers can read from this node."""
        await self._node.ready.wait()
        await Directory(self._node, self._config.scheduler_addresses, self._tasks, self._leaving).run()

    async def drain(self) -> None:
        """Finish write-back, including that of workers that drain at the same time: until they leave or save nothing
        more."""
        await rpc.set_serving(self._health, False)
        node = self._node
        if not await node.settle(DRAIN_S):
            log.warning("write-back was cut short", pending_bytes=node.pending_bytes)

    async def stop(self) -> None:
        """Release everything."""
        with contextlib.suppress(Exception):
            await self._grpc.stop(_STOP_S)
        await self._tasks.cancel()
        await self._node.stop()
        if self._leaving.over:
            await asyncio.to_thread(empty, self._node.places.directory)


async def _main(config: Config, number: int) -> int:
    made = KvStoreService(config, number)
    try:
        return await service.serve(made, made.failed, DRAIN_S, left=made.left)
    except ConfigError as e:
        log.error("cannot start", error=str(e))
        return 2


def main() -> None:
    """The entry point."""
    config, number, _ = service.arguments("kvstore", with_node=True)
    # Before gRPC starts threads: they read the environment, which glibc may move when it is written.
    nixl.set_environment(config.nodes.ucx_interface)
    service.run(_main(config, number))


if __name__ == "__main__":
    main()
