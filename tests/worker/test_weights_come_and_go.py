"""Weights from an image in host memory: the bytes of the checkpoint, layer by layer, shared, checked and removed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from runtime.weight_images import remove_unused
from tests.worker.engine_harness import CHUNK, GRANULE, tiny_model
from worker.core.granules import GranuleState
from worker.memory.device_memory import DeviceMemory, host_memory
from worker.models import filling, image
from worker.models.filling import FillFailed, Filling
from worker.models.image import HostImage, image_of
from worker.models.load import Model, lay_out, load_model
from worker.models.weights import WeightSpan

ROOM = 1 << 30


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def memory() -> Iterator[DeviceMemory]:
    made = host_memory(512 * GRANULE, GRANULE)
    yield made
    made.close()


def laid_out(directory: Path, memory: DeviceMemory) -> Model:
    return lay_out(directory, memory, "float32", "cpu", CHUNK, None)


def made(tmp_path: Path, model: Model) -> HostImage:
    found = image_of(tmp_path, b"key", model.spans, ROOM)
    assert found is not None
    return found


def contents(model: Model) -> list[torch.Tensor]:
    return [view.clone() for span in model.spans for view in span.views.values()]


def test_weights_from_an_image_are_those_of_the_checkpoint_each_time(
    directory: Path, memory: DeviceMemory, tmp_path: Path
) -> None:
    expected = contents(load_model(directory, memory, "float32", "cpu", CHUNK, None))
    model = laid_out(directory, memory)
    host = made(tmp_path, model)
    for _ in range(2):
        model.take()
        weights = Filling(model.spans, host, lambda: None, threads=2)
        weights.wait(len(weights) - 1)
        assert all(torch.equal(a, b) for a, b in zip(contents(model), expected, strict=True))
        model.unload()
    assert memory.ledger.warm, "memory that changes hands stays allocated"
    memory.validate()
    host.close()


def test_without_an_image_the_checkpoint_is_packed(directory: Path, memory: DeviceMemory) -> None:
    expected = contents(load_model(directory, memory, "float32", "cpu", CHUNK, None))
    model = laid_out(directory, memory)
    model.take()
    weights = Filling(model.spans, None, lambda: None)
    weights.wait(len(weights) - 1)
    assert all(torch.equal(a, b) for a, b in zip(contents(model), expected, strict=True)) and not weights.layerwise


def test_layers_come_in_order_and_a_step_waits_for_its_own_only(
    directory: Path, memory: DeviceMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filling, "PIECE_BYTES", 1)
    model = laid_out(directory, memory)
    host = made(tmp_path, model)
    model.take()
    gate, seen = threading.Semaphore(0), list[int]()

    def copy(to: int, source: int, size: int) -> None:
        gate.acquire()

    weights = Filling(model.spans, host, lambda: seen.append(weights.ready), copy=copy)
    pieces = [span.span.granules for span in model.spans]
    gate.release(pieces[0] + pieces[1])
    weights.wait(1)
    assert weights.ready == 2 and not weights.over
    waiting = threading.Thread(target=weights.wait, args=(2,))
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    gate.release(sum(pieces[2:]))
    waiting.join(10)
    weights.wait(len(weights) - 1)
    assert seen == list(range(1, len(weights) + 1)) and weights.over
    host.close()


def test_a_copy_that_fails_is_told_to_who_waits(directory: Path, memory: DeviceMemory, tmp_path: Path) -> None:
    model = laid_out(directory, memory)
    host = made(tmp_path, model)
    model.take()

    def copy(to: int, source: int, size: int) -> None:
        raise OSError("no more")

    weights = Filling(model.spans, host, lambda: None, copy=copy)
    with pytest.raises(FillFailed, match="no more"):
        weights.wait(0)
    weights.cancel()
    assert weights.over
    host.close()


def test_workers_share_an_image_and_the_last_removes_it(directory: Path, memory: DeviceMemory, tmp_path: Path) -> None:
    model = laid_out(directory, memory)
    first = made(tmp_path, model)
    second = made(tmp_path, model)
    assert first.path == second.path and first.path.stat().st_ino == second.path.stat().st_ino
    first.close()
    assert second.path.exists()
    second.close()
    assert not list(tmp_path.iterdir()), "no lock file stays either"


def test_a_damaged_image_is_made_again(directory: Path, memory: DeviceMemory, tmp_path: Path) -> None:
    model = laid_out(directory, memory)
    first = made(tmp_path, model)
    with first.path.open("r+b") as file:
        file.seek(100)
        file.write(b"damage")
    again = made(tmp_path, model)
    model.take()
    Filling(model.spans, again, lambda: None).wait(len(model.spans) - 1)
    expected = contents(load_model(directory, memory, "float32", "cpu", CHUNK, None))
    assert all(torch.equal(a, b) for a, b in zip(contents(model), expected, strict=True))
    first.close()
    assert again.path.exists(), "another file has its path by now"
    again.close()
    assert not list(tmp_path.glob("*.image"))


def test_an_image_without_room_is_not_made_and_one_that_nobody_uses_is_removed(
    directory: Path, memory: DeviceMemory, tmp_path: Path
) -> None:
    model = laid_out(directory, memory)
    assert image_of(tmp_path, b"key", model.spans, 1000) is None
    for suffix in ("image", "1234", "lock"):
        (tmp_path / f"upbeat-weights-of-a-killed-worker.{suffix}").write_bytes(b"x")
    used = made(tmp_path, model)
    remove_unused(tmp_path)
    assert list(tmp_path.iterdir()) == [used.path]
    used.close()


def test_an_image_that_is_being_written_survives_the_start_of_another_worker(
    directory: Path, memory: DeviceMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, pack, seen = laid_out(directory, memory), WeightSpan.pack_at, list[str]()

    def pack_at(span: WeightSpan, address: int) -> None:
        remove_unused(tmp_path)
        seen.extend(path.suffix for path in tmp_path.iterdir())
        pack(span, address)

    monkeypatch.setattr(WeightSpan, "pack_at", pack_at)
    made(tmp_path, model).close()
    assert ".lock" in seen and not list(tmp_path.iterdir())


@pytest.mark.parametrize("where", ["missing", "full"])
def test_a_directory_that_cannot_be_written_leaves_no_image_and_nothing_else(
    directory: Path, memory: DeviceMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    model, place = laid_out(directory, memory), tmp_path / "absent" if where == "missing" else tmp_path
    if where == "full":
        monkeypatch.setattr(image.os, "posix_fallocate", lambda *_: (_ for _ in ()).throw(OSError(28, "no space")))
    assert image_of(place, b"key", model.spans, ROOM) is None
    assert not list(tmp_path.iterdir())


def test_weights_that_find_no_memory_change_nothing(directory: Path) -> None:
    memory = host_memory(4 * GRANULE, GRANULE)
    model = laid_out(directory, memory)
    before = memory.ledger.counts()
    with pytest.raises(MemoryError):
        model.take()
    model.unload(keep=False)
    assert memory.ledger.counts() == before and (None, GranuleState.FREE) in before
    memory.validate()
    memory.close()
