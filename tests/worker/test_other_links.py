"""Weights over several links: the same bytes, faster, and whatever a link does, the load goes on."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from contracts.errors import ConfigError
from runtime.config_file import load_config
from runtime.gpus import others, visible
from runtime.registry import load_links
from tests.worker.engine_harness import CHUNK, GRANULE, tiny_model
from tests.worker.virtual_links import Pace, PacedLink
from worker.devices.device import choose_device
from worker.memory.cuda_driver import CudaError
from worker.memory.cuda_links import CudaLink
from worker.memory.device_memory import DeviceMemory, host_memory
from worker.models import filling
from worker.models.filling import Filling, host_copy
from worker.models.image import HostImage, image_of
from worker.models.load import Model, lay_out, load_model
from worker.models.other_links import LANES, Buffer, OtherLinks

#: Bytes per second of a link; the tiny model has about 2 MB.
_PACE = 6e6


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def memory() -> Iterator[DeviceMemory]:
    made = host_memory(512 * GRANULE, GRANULE)
    yield made
    made.close()


@pytest.fixture
def model(
    directory: Path, memory: DeviceMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Model, HostImage, list[torch.Tensor]]]:
    """Its image, and what it must be. Pieces are single granules."""
    monkeypatch.setattr(filling, "PIECE_BYTES", 1)
    expected = contents(load_model(directory, memory, "float32", "cpu", CHUNK, None))
    made = lay_out(directory, memory, "float32", "cpu", CHUNK, None)
    image = image_of(tmp_path, b"key", made.spans, 1 << 30)
    assert image is not None
    yield made, image, expected
    image.close()


def contents(model: Model) -> list[torch.Tensor]:
    return [view.clone() for span in model.spans for view in span.views.values()]


def filled(model: Model, image: HostImage, links: OtherLinks, copy: Any = host_copy) -> Filling:
    model.take()
    weights = Filling(model.spans, image, lambda: None, copy=copy, threads=2, others=links)
    weights.wait(len(weights) - 1)
    return weights


def same(model: Model, expected: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(contents(model), expected, strict=True))


def test_more_links_bring_the_same_bytes_in_less_time(model: tuple[Model, HostImage, list[torch.Tensor]]) -> None:
    of, image, expected = model
    seconds = {}
    for count in (1, 2, 4):
        links = [PacedLink(f"link {n}", _PACE / 4) for n in range(1, count)]
        weights = filled(of, image, OtherLinks(links), Pace(_PACE / 4).copy)
        assert same(of, expected) and sum(weights.carried) == weights.bytes
        assert min(weights.carried) > 0, "each link carries something"
        seconds[count] = weights.seconds
        of.unload()
    assert seconds[1] > 1.3 * seconds[2] and seconds[1] > 1.6 * seconds[4], seconds


@pytest.mark.parametrize("fails_after", [0, 1, 5])
def test_what_a_link_that_fails_had_comes_over_the_others(
    model: tuple[Model, HostImage, list[torch.Tensor]], fails_after: int
) -> None:
    of, image, expected = model
    links = [PacedLink("works", _PACE), PacedLink("fails", _PACE, fails_after)]
    known = OtherLinks(links)
    weights = filled(of, image, known, Pace(_PACE).copy)
    assert same(of, expected) and sum(weights.carried) == weights.bytes
    assert links[1].left == 0 and known.settled(10) and not any(link.buffers for link in links)


class Held:
    """A link whose staging waits for `go`, and which counts what it delivers."""

    name = "held"

    def __init__(self) -> None:
        self.go, self.staging, self.delivered = threading.Event(), threading.Event(), 0

    def buffer(self, bytes_: int) -> Buffer:
        return self

    def stage(self, source: int, bytes_: int) -> None:
        self.staging.set()
        assert self.go.wait(30)

    def deliver(self, to: int, bytes_: int) -> None:
        self.delivered += 1
        ctypes.memset(to, 0xFF, bytes_)

    def close(self) -> None:
        pass


def test_a_link_that_stalls_holds_nobody_up_and_writes_nothing_later(
    model: tuple[Model, HostImage, list[torch.Tensor]],
) -> None:
    of, image, expected = model
    held = Held()
    known = OtherLinks([held])

    def slow(to: int, source: int, bytes_: int) -> None:
        assert held.staging.wait(30)
        host_copy(to, source, bytes_)

    weights = filled(of, image, known, slow)
    assert weights.over and weights.carried == [weights.bytes, 0] and same(of, expected)
    assert not known.settled(0)
    held.go.set()
    assert known.settled(30) and not held.delivered and same(of, expected)


def test_a_load_that_is_cancelled_waits_for_what_writes_and_not_for_what_is_staged(
    model: tuple[Model, HostImage, list[torch.Tensor]],
) -> None:
    of, image, _ = model
    held, known, writing, go_on = Held(), OtherLinks(), threading.Event(), threading.Event()
    known = OtherLinks([held])

    def copy(to: int, source: int, bytes_: int) -> None:
        writing.set()
        assert go_on.wait(30)

    of.take()
    weights = Filling(of.spans, image, lambda: None, copy=copy, others=known)
    assert writing.wait(30) and held.staging.wait(30)
    cancelling = threading.Thread(target=weights.cancel)
    cancelling.start()
    cancelling.join(0.05)
    assert cancelling.is_alive()
    go_on.set()
    cancelling.join(30)
    assert not cancelling.is_alive() and not known.settled(0)
    held.go.set()
    assert known.settled(30) and not held.delivered and not weights.over


def test_loads_at_one_time_have_no_more_buffers_than_one(model: tuple[Model, HostImage, list[torch.Tensor]]) -> None:
    of, image, expected = model
    held = Held()
    known = OtherLinks([held])
    with known.buffer(1, 10), known.buffer(1, 10):
        weights = filled(of, image, known)
        assert weights.carried == [weights.bytes, 0] and same(of, expected)
    assert LANES == 2


# ---- CUDA's copies
# -----------------------------------------------------------------------------------------------------
class Peer:
    """Memory of another device: the host's. most: bytes that it has."""

    def __init__(self, most: int) -> None:
        self.most, self.held = most, dict[int, Any]()

    def allocate(self, bytes_: int) -> int:
        if bytes_ > self.most - sum(len(each) for each in self.held.values()):
            raise CudaError("cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY")
        made = (ctypes.c_ubyte * bytes_)()
        self.held[ctypes.addressof(made)] = made
        return ctypes.addressof(made)

    def deallocate(self, address: int) -> None:
        del self.held[address]


class Stream:
    """Runs its copies when its mark is waited for. within: the peer, whose buffers its copies begin or end in."""

    def __init__(self, peer: Peer) -> None:
        self.peer, self.work, self._lock = peer, list[tuple[int, int, int]](), threading.Lock()

    def copy(self, to: Any, source: Any, bytes_: int) -> None:
        assert int(to[0]) in self.peer.held
        self.work.append((int(to[0]), int(source[0]), bytes_))

    def copy_from_peer(self, to: int, source: int, bytes_: int) -> None:
        assert source in self.peer.held
        self.work.append((to, source, bytes_))

    def mark(self) -> Any:
        return self

    def wait_for(self, mark: Any) -> None:
        raise AssertionError("not used")

    def reached(self) -> bool:
        return not self.work

    def wait(self) -> None:
        with self._lock:
            while self.work:
                ctypes.memmove(*self.work.pop(0))


@pytest.mark.parametrize("most", [0, GRANULE, 1 << 30])
def test_copies_through_another_device_use_its_memory_only_during_a_load(
    model: tuple[Model, HostImage, list[torch.Tensor]], most: int
) -> None:
    of, image, expected = model
    peer = Peer(most)
    known = OtherLinks([CudaLink("cuda:1", peer, Stream(peer), Stream(peer))])
    weights = filled(of, image, known, Pace(_PACE).copy)
    assert same(of, expected) and sum(weights.carried) == weights.bytes
    assert (weights.carried[1] > 0) == (most > GRANULE) or most == GRANULE
    assert known.settled(10) and not peer.held


# ---- settings
# -----------------------------------------------------------------------------------------------------
def test_each_device_is_used_by_as_many_others() -> None:
    for devices, links in ((2, 2), (4, 3), (8, 8)):
        used = [each for device in range(devices) for each in others(device, devices, links)]
        assert sorted(used) == sorted(list(range(devices)) * (links - 1))
        assert all(device not in others(device, devices, links) for device in range(devices))
    assert others(1, 4, 1) == []


def test_a_worker_sees_its_own_device_first_and_those_that_it_loads_through() -> None:
    assert visible(None, 4, 3, [0, 1]) == "3,0,1"
    assert visible("GPU-a, GPU-b,GPU-c", 3, 1, [2]) == "GPU-b,GPU-c"
    for count in (1, 2):
        with pytest.raises(ConfigError, match=rf"worker\.load_links = 2: .*device 2, .* sees {count} .*set it to 1"):
            visible(None, count, 1, [2])
    assert visible(None, 0, 1, [2]) is None, "no CUDA at all is said by who needs it"


def test_only_the_nodes_own_devices_are_used_and_only_where_weights_come_and_go(directory: Path) -> None:
    with pytest.raises(ConfigError, match=r"worker\.load_links = 3: .*nodes\.devices = 2.*; lower it"):
        load_config(None, {"nodes": {"devices": 2}, "worker": {"load_links": 3}})
    with pytest.raises(ConfigError, match=r"worker\.load_links = 0"):
        load_config(None, {"worker": {"load_links": 0}})
    said = {"nodes": {"devices": 2}, "worker": {"load_links": 2, "device": "cpu"}, "kv": {"hbm_gib": 0.0625}}
    config = load_config(None, said | {"models": {"a": {"path": str(directory)}, "b": {"path": str(directory)}}})
    assert load_links(config, 2) == 2 and load_links(config, 1) == 1
    assert load_links(config.model_copy(update={"sharing": "static"}), 2) == 1
    with pytest.raises(ConfigError, match=r"worker\.load_links = 2: the CPU computes here.*set it to 1"):
        choose_device(config, 1, [directory, directory])
