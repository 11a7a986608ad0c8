"""The connector, and beside it a record of every piece's bytes when it was copied out of vLLM's blocks and when it was
copied into them. `compare` reads the records of all servers.

For tests only: `VllmServer(..., records=FOLDER)` loads it in place of `upbeat_vllm.connector`. A line is: what, chunk
key, layer, head, digest of the head's share; ranks of any split write the same ones.
"""

from __future__ import annotations

import ctypes
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = "UPBEAT_TEST_RECORDS"
SAVED, LOADED = "saved", "loaded"


class Compared(NamedTuple):
    """Heads' shares of pieces: how many were loaded, and those that were not equal to one that was saved."""

    loaded: int
    different: list[tuple[str, ...]]


def compare(folder: Path) -> Compared:
    """What was loaded against what was saved under the same key, by all servers that wrote into `folder`."""
    saved: defaultdict[tuple[str, ...], set[str]] = defaultdict(set)
    loaded: list[tuple[tuple[str, ...], str]] = []
    for what, name, digest in _lines(folder):
        if what == SAVED:
            saved[name].add(digest)
        else:
            loaded.append((name, digest))
    return Compared(len(loaded), [name for name, digest in loaded if digest not in saved.get(name, ())])


def _lines(folder: Path) -> Iterator[tuple[str, tuple[str, ...], str]]:
    for file in folder.glob("*.txt"):
        for line in file.read_text().splitlines():
            what, *name, digest = line.split()
            yield what, tuple(name), digest


if FOLDER in os.environ:  # in a vLLM server: elsewhere there is no vLLM
    from blake3 import blake3
    from upbeat_vllm.connector import UpbeatConnector, UpbeatMetadata
    from upbeat_vllm.orders import StepOrders

    class RecordedBlocks:
        """A rank's blocks, and the record."""

        def __init__(self, blocks: Any, heads: int, piece_bytes: int) -> None:
            self._blocks, self._head_bytes = blocks, piece_bytes // heads
            self.keys: dict[str, dict[int, bytes]] = {SAVED: {}, LOADED: {}}
            self._file = (Path(os.environ[FOLDER]) / f"{os.getpid()}.txt").open("a", buffering=1 << 16)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._blocks, name)

        def load(self, layer: int, pieces: Sequence[tuple[int, int]]) -> None:
            self._blocks.load(layer, pieces)
            self._write(LOADED, layer, pieces)

        def save(self, layer: int, pieces: Sequence[tuple[int, int]]) -> None:
            self._write(SAVED, layer, pieces)
            self._blocks.save(layer, pieces)

        def _write(self, what: str, layer: int, pieces: Sequence[tuple[int, int]]) -> None:
            share, size = self._blocks.share_bytes, self._head_bytes
            base = self._blocks._blocks[layer - self._blocks.layers.start].data_ptr()
            first = self._blocks.share_at // size
            lines = []
            for block, _ in pieces:
                key = self.keys[what][block].hex()[:24]
                data = ctypes.string_at(base + block * share, share)
                for head in range(share // size):
                    digest = blake3(data[head * size : (head + 1) * size]).hexdigest()[:24]
                    lines.append(f"{what} {key} {layer} {first + head} {digest}\n")
            self._file.write("".join(lines))
            self._file.flush()

    class RecordedMetadata(UpbeatMetadata):
        """keys: of chunks, by number of the load or save."""

        def __init__(self, orders: StepOrders, keys: dict[int, list[bytes]]) -> None:
            super().__init__(orders)
            self.keys = keys

    class UpbeatRecordedConnector(UpbeatConnector):
        """See the module."""

        def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
            self._asked: dict[int, list[bytes]] = {}
            super().__init__(vllm_config, role, kv_cache_config)
            if (side := self._scheduler) is not None:
                flush = side.flush

                def noting() -> None:
                    for message in side.core.to_store:
                        if message.HasField("load"):
                            self._asked[message.load.load_id] = [c.key for c in message.load.chunks]
                        elif message.HasField("save"):
                            self._asked[message.save.save_id] = list(message.save.keys)
                    flush()

                side.flush = noting  # type: ignore[method-assign]

        def update_connector_output(self, connector_output: Any) -> None:
            """Computing takes no time that is known, so all that the store has is loaded, however busy it is."""

        def build_connector_meta(self, scheduler_output: Any) -> RecordedMetadata:
            orders = super().build_connector_meta(scheduler_output).orders
            numbers = [o.load_id for o in orders.loads] + [o.save_id for o in orders.saves]
            return RecordedMetadata(orders, {n: self._asked.pop(n) for n in numbers})

        def register_kv_caches(self, kv_caches: Any) -> None:
            super().register_kv_caches(kv_caches)
            assert self._geometry is not None and self._rank is not None
            shape = self._geometry.shape
            self._recorded = RecordedBlocks(self._rank._blocks, shape.kv_heads, shape.piece_bytes)
            self._rank._blocks = self._recorded

        def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
            metadata = self._get_connector_metadata()
            for order in metadata.orders.loads:
                self._recorded.keys[LOADED].update(zip(order.blocks, metadata.keys[order.load_id], strict=False))
            for order in metadata.orders.saves:
                self._recorded.keys[SAVED].update(zip(order.blocks, metadata.keys[order.save_id], strict=False))
            super().start_load_kv(forward_context, **kwargs)
